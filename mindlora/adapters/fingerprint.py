"""A short fingerprint of the base weights under an adapter, to detect that an adapter is loaded onto another base."""

import hashlib
from typing import Dict, Iterable, List, Optional, Tuple

import numpy as np

# Reading every weight of a 7B base back from the device takes seconds; a few, evenly spread, tell bases apart.
_SAMPLED_WEIGHTS = 8
_SAMPLES_PER_WEIGHT = 1024


def sampled_paths(paths: Iterable[str]) -> List[str]:
    """Returns those of ``paths`` whose weights are sampled."""
    ordered = sorted(paths)
    count = min(_SAMPLED_WEIGHTS, len(ordered))
    return [ordered[index] for index in sorted({round(i) for i in np.linspace(0, len(ordered) - 1, count)})]


def sampled_elements(weight: np.ndarray) -> np.ndarray:
    """Returns the sampled elements of a weight, or of its codes if it is quantized."""
    flat = weight.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(_SAMPLES_PER_WEIGHT, flat.size)).astype(np.int64)]


def fingerprint_from(shapes: Dict[str, Tuple[int, ...]], samples: Dict[str, np.ndarray]) -> Dict[str, str]:
    """Returns the fingerprint: a hash of all paths and shapes, and a hash of the sampled elements.

    Args:
        shapes (dict): path -> shape, of every adapted weight.
        samples (dict): path -> sampled elements, of the sampled weights.

    Returns:
        dict of "shapes" and "values", each the first 16 digits of a SHA-256.
    """
    structure, values = hashlib.sha256(), hashlib.sha256()
    for path in sorted(shapes):
        structure.update(f"{path}{tuple(shapes[path])};".encode())
    for path in sorted(samples):
        values.update(np.ascontiguousarray(samples[path].astype(np.float32)).tobytes())
    return {"shapes": structure.hexdigest()[:16], "values": values.hexdigest()[:16]}


def forms_that_differ(stored: dict, found: dict) -> Optional[Tuple[str, str]]:
    """Returns how the two bases are quantized ("float": not at all) if their values cannot be compared, or None.

    Args:
        stored (dict): Fingerprint in an adapter.
        found (dict): Fingerprint of the base at hand.

    LoftQ changes the base itself, so an adapter trained on LoftQ's base suits no other base; then values are compared.
    """
    forms = stored.get("quantization", "float"), found.get("quantization", "float")
    return None if forms[0] == forms[1] or "loftq" in forms else forms


def base_difference(stored: dict, found: dict) -> str:
    """Returns in words how two fingerprints differ, or "" if they agree.

    Args:
        stored (dict): Fingerprint in an adapter.
        found (dict): Fingerprint of the base at hand.
    """
    if stored.get("shapes") != found["shapes"]:
        return "the adapted weights have other paths or shapes"
    if stored.get("values") != found["values"]:
        return "the adapted weights have other values (another checkpoint, or another dtype)"
    return ""
