"""A short mark of the base weights under an adapter, to notice an adapter that is put on another base."""
import hashlib
from typing import Dict, Iterable, List, Optional, Tuple

import numpy as np
from mindspore import nn

from mindlora.adapt import lora_cells
from mindlora.nn.tree import weight_of

# Reading every weight of a 7B base back from the device takes seconds; a few, evenly spread, tell bases apart.
_SAMPLED_WEIGHTS = 8
_SAMPLES_PER_WEIGHT = 1024


def base_fingerprint(network: nn.Cell) -> Optional[dict]:
    """Returns a mark of the frozen weights under the adapters of ``network``, as they were before any start_adapters.

    Args:
        network (nn.Cell): A network with LoRADense cells.

    Returns:
        dict with "shapes", a hash of the paths and shapes of all adapted weights, and "values", a hash of up to 1024
        elements of each of up to 8 of them; of quantized ones of their codes, and with "quantization", how. None
        while MindSpore has not given the weights values yet.
    """
    cells = dict(lora_cells(network))
    for cell in cells.values():
        if cell.origin:
            return cell.origin.fingerprint
    return fingerprint_of(cells)


def fingerprint_of(cells: Dict[str, nn.Cell]) -> Optional[dict]:
    """Returns base_fingerprint's mark of the weights of cells by their paths."""
    if any(weight_of(cell).has_init for cell in cells.values()):
        return None
    mark = mark_of({path: weight_shape(cell) for path, cell in cells.items()},
                   {path: picked(weight_of(cells[path]).asnumpy()) for path in sampled(cells)})
    kinds = {kind for cell in cells.values() if (kind := getattr(cell, "quantization", None))}
    return {**mark, "quantization": "loftq" if "loftq" in kinds else kinds.pop()} if kinds else mark


def sampled(paths: Iterable[str]) -> List[str]:
    """Returns those of ``paths`` whose weights are looked into."""
    paths = sorted(paths)
    return [paths[index] for index in
            sorted({round(i) for i in np.linspace(0, len(paths) - 1, min(_SAMPLED_WEIGHTS, len(paths)))})]


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


def weight_shape(cell: nn.Cell) -> Tuple[int, ...]:
    """Returns the shape of the weight of a cell, of a quantized one that of the weight it stands for."""
    if getattr(cell, "quantization", None):
        return cell.out_channels, cell.in_channels
    return tuple(weight_of(cell).shape)


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
