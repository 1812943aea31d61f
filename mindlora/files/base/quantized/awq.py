"""AWQ's weights in 4 bits: W[n, k] = (code[k, n] - zero[group of k, n]) * scale[group of k, n].

A word has the codes of eight out_channels, in the order 0, 2, 4, 6, 1, 3, 5, 7.

Sources: Lin et al., AWQ, 2023; the layout is AutoAWQ's, version gemm.
"""

import functools
from typing import Any, List, Mapping, Optional

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import FLOATS
from mindlora.files.base.quantized.gptq import INT32, QWEIGHT, group_size, groups_of, settings_of
from mindlora.files.base.quantized.stored import Integers, PackedWeight, StoredTensors, unpacked

# The place in a word of each of its eight channels.
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
_BITS, _IN_WORD = 4, 8


def weights(stored: StoredTensors, settings: Mapping[str, Any]) -> List[PackedWeight]:
    """Returns the weights in AWQ; ``settings`` has bits (or w_bit), group_size (or q_group_size) and version.

    Raises CheckpointError, naming the setting or the tensor, if they cannot be decoded.
    """
    bits = settings.get("bits", settings.get("w_bit", _BITS))
    version = str(settings.get("version", "gemm")).lower()
    for key, value, readable in (("bits", bits, _BITS), ("version", version, "gemm")):
        if value != readable:
            raise CheckpointError(
                f"{stored.path} is in AWQ with {key} {value!r}, and {readable} can be read. Take the original "
                "model, or one in the version gemm."
            )
    paths = [name[: -len(QWEIGHT)] for name in stored.tensors if name.endswith(QWEIGHT)]
    return [_weight(stored, path, group_size(stored, settings_of(stored, settings, path))) for path in paths]


def _weight(stored: StoredTensors, path: str, size: Optional[int]) -> PackedWeight:
    qweight, qzeros, scales = (f"{path}.{part}" for part in ("qweight", "qzeros", "scales"))
    columns, words = stored.matrix(qweight)
    rows = words * _IN_WORD
    groups = groups_of(stored, qweight, columns, size)
    stored.check(qweight, [(columns, words)], [INT32], path)
    stored.part(qweight, qzeros)
    stored.part(qweight, scales)
    stored.check(qzeros, [(groups, words)], [INT32], qweight)
    stored.check(scales, [(groups, rows)], FLOATS, qweight)

    def channels(name: str, begin: int, end: int) -> np.ndarray:
        """Returns the codes of out_channels [begin, end): uint8 [end - begin, rows of the tensor]."""
        first, last = begin // _IN_WORD, -(-end // _IN_WORD)
        in_words = unpacked(stored.read_columns(name, first, last), _BITS, (last - first) * _IN_WORD)
        in_turn = in_words.reshape(-1, last - first, _IN_WORD)[:, :, _PLACES].reshape(len(in_words), -1)
        return in_turn[:, begin - first * _IN_WORD : end - first * _IN_WORD].T

    integers = Integers(
        _BITS,
        groups,
        stored.tensors[scales].dtype,
        lambda begin, end: np.ascontiguousarray(channels(qweight, begin, end)),
        functools.partial(channels, qzeros),
        lambda begin, end: stored.read_columns(scales, begin, end).T,
    )
    return integers.as_weight(f"{path}.weight", (rows, columns), (qweight, qzeros, scales), "AWQ in 4 bits")
