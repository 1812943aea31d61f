"""msModelSlim's weights in 8-bit integers (W8A8, W8A16), as Ascend's model zoo publishes them.

W = (code - weight_offset) * weight_scale, by rows. quant_model_description.json says of each tensor what it is; what
quantizes activations (input_scale, deq_scale, quant_bias, ...) is left out.

Source: vllm-ascend's w8a8 and w8a16 methods, which name the tensors and their shapes.
"""

import functools
from typing import Any, List, Mapping

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import FLOATS, to_float32
from mindlora.core.text import examples
from mindlora.files.base.quantized.stored import Integers, PackedWeight, StoredTensors

DESCRIPTION = "quant_model_description"
_FLOAT = "FLOAT"
_KINDS = ("W8A8", "W8A8_DYNAMIC", "W8A16")


def weights(stored: StoredTensors, settings: Mapping[str, Any]) -> List[PackedWeight]:
    """Returns the weights in 8 bits; ``settings`` is the content of quant_model_description.json.

    Raises CheckpointError, naming the tensor, if one is missing, wrong, or of a kind that cannot be read.
    """
    kinds = {name: settings.get(name, _FLOAT) for name in stored.tensors if name.endswith(".weight")}
    unknown = [name for name, kind in kinds.items() if kind not in (_FLOAT, *_KINDS)]
    if unknown:
        raise CheckpointError(
            f"{stored.path}: {DESCRIPTION}.json says {kinds[unknown[0]]!r} of {examples(unknown)}, and "
            f"{', '.join((_FLOAT, *_KINDS))} can be read. Take the original model, or one in these."
        )
    return [_weight(stored, name, str(kind)) for name, kind in kinds.items() if kind != _FLOAT]


def _weight(stored: StoredTensors, name: str, kind: str) -> PackedWeight:
    rows, columns = stored.matrix(name)
    scale, offset = f"{name}_scale", f"{name}_offset"
    stored.check(name, [(rows, columns)], [np.dtype("i1")], f"{kind} in {DESCRIPTION}.json")
    for part in (scale, offset):
        stored.part(name, part)
        stored.check(part, [(rows, 1), (rows,)], FLOATS, name)

    def column(part: str, begin: int, end: int) -> np.ndarray:
        return stored.read_rows(part, begin, end).reshape(-1, 1)

    integers = Integers(
        8,
        1,
        stored.tensors[scale].dtype,
        functools.partial(stored.read_rows, name),
        lambda begin, end: to_float32(column(offset, begin, end)),
        functools.partial(column, scale),
    )
    return integers.as_weight(name, (rows, columns), (name, scale, offset), f"msModelSlim's {kind}")
