"""A short mark of the base weights under an adapter, to notice an adapter that is put on another base."""

import hashlib
from typing import Dict, Iterable, List, Optional, Tuple

import numpy as np

# Reading every weight of a 7B base back from the device takes seconds; a few, evenly spread, tell bases apart.
_SAMPLED_WEIGHTS = 8
_SAMPLES_PER_WEIGHT = 1024


def sampled(paths: Iterable[str]) -> List[str]:
    """Returns those of ``paths`` whose weights are looked into."""
    paths = sorted(paths)
    return [
        paths[index]
        for index in sorted({round(i) for i in np.linspace(0, len(paths) - 1, min(_SAMPLED_WEIGHTS, len(paths)))})
    ]


def picked(weight: np.ndarray) -> np.ndarray:
    """Returns the elements of a weight, or of the codes that stand for it, that are looked at."""
    flat = weight.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(_SAMPLES_PER_WEIGHT, flat.size)).astype(np.int64)]


def mark_of(shapes: Dict[str, Tuple[int, ...]], samples: Dict[str, np.ndarray]) -> Dict[str, str]:
    """Returns the hashes of all weights' shapes, by path, and of what was picked from some of them."""
    told, values = hashlib.sha256(), hashlib.sha256()
    for path in sorted(shapes):
        told.update(f"{path}{tuple(shapes[path])};".encode())
    for path in sorted(samples):
        values.update(np.ascontiguousarray(samples[path].astype(np.float32)).tobytes())
    return {"shapes": told.hexdigest()[:16], "values": values.hexdigest()[:16]}


def forms_that_differ(stored: dict, found: dict) -> Optional[Tuple[str, str]]:
    """Returns the forms of two bases whose values cannot be compared, one being quantized and the other not, or None.

    LoftQ's base is never the same as the one in float: what was trained on it fits it alone.
    """
    forms = tuple(mark.get("quantization", "float") for mark in (stored, found))
    return None if forms[0] == forms[1] or "loftq" in forms else forms


def base_difference(stored: dict, found: dict) -> str:
    """Returns in words how two fingerprints differ, or "" where they agree."""
    if stored.get("shapes") != found["shapes"]:
        return "the adapted weights have other paths or shapes"
    if stored.get("values") != found["values"]:
        return "the adapted weights have other values (another checkpoint, or another dtype)"
    return ""
