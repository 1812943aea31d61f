"""A short mark of the base weights under an adapter, to notice an adapter that is put on another base."""
import hashlib
from typing import Dict, Optional

import numpy as np
from mindspore import Parameter, nn

from mindlora.adapt import lora_cells

# Reading every weight of a 7B base back from the device takes seconds; a few, evenly spread, tell bases apart.
_SAMPLED_WEIGHTS = 8
_SAMPLES_PER_WEIGHT = 1024


def base_fingerprint(network: nn.Cell) -> Optional[dict]:
    """Returns a mark of the frozen weights under the adapters of ``network``.

    Args:
        network (nn.Cell): A network with LoRADense cells.

    Returns:
        dict with "shapes", a hash of the paths and shapes of all adapted weights, and "values", a hash of up to 1024
        elements of each of up to 8 of them; or None while MindSpore has not given the weights values yet.
    """
    return fingerprint_of({path: cell.weight for path, cell in lora_cells(network)})


def fingerprint_of(weights: Dict[str, Parameter]) -> Optional[dict]:
    """Returns base_fingerprint's mark of weights by the path of their cell."""
    if any(weight.has_init for weight in weights.values()):
        return None
    shapes, values = hashlib.sha256(), hashlib.sha256()
    paths = sorted(weights)
    for path in paths:
        shapes.update(f"{path}{tuple(weights[path].shape)};".encode())
    for index in sorted({round(i) for i in np.linspace(0, len(paths) - 1, min(_SAMPLED_WEIGHTS, len(paths)))}):
        flat = weights[paths[index]].asnumpy().reshape(-1)
        picked = flat[np.linspace(0, flat.size - 1, min(_SAMPLES_PER_WEIGHT, flat.size)).astype(np.int64)]
        values.update(np.ascontiguousarray(picked.astype(np.float32)).tobytes())
    return {"shapes": shapes.hexdigest()[:16], "values": values.hexdigest()[:16]}


def base_difference(stored: dict, found: dict) -> str:
    """Returns in words how two fingerprints differ, or "" where they agree."""
    if stored.get("shapes") != found["shapes"]:
        return "the adapted weights have other paths or shapes"
    if stored.get("values") != found["values"]:
        return "the adapted weights have other values (another checkpoint, or another dtype)"
    return ""
