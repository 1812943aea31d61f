"""A short mark of the base weights under an adapter, to notice an adapter that is put on another base."""
import hashlib
from typing import Optional

import numpy as np
from mindspore import nn

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
    cells = sorted(lora_cells(network), key=lambda item: item[0])
    if any(cell.weight.has_init for _, cell in cells):
        return None
    shapes, values = hashlib.sha256(), hashlib.sha256()
    for path, cell in cells:
        shapes.update(f"{path}{tuple(cell.weight.shape)};".encode())
    for index in sorted({round(i) for i in np.linspace(0, len(cells) - 1, min(_SAMPLED_WEIGHTS, len(cells)))}):
        flat = cells[index][1].weight.asnumpy().reshape(-1)
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
