"""Tensors of mcore as MindFormers 2's PyNative trainer has them: the reverse of mcore_view."""

from typing import Dict, List, Optional

import numpy as np

from mindlora.files.base.mcore_view import BIAS, MCORE_BIAS, with_end
from mindlora.files.base.writer import OutputTensor, Shard


def shards(of_mcore: List[Shard], heights: Dict[str, int]) -> List[Shard]:
    """Returns shards of mcore's tensors in the trainer's form.

    Args:
        of_mcore (list of Shard): Their tensors.
        heights (dict): Name of an expert weight -> rows of each expert.
    """
    converted = []
    for shard in of_mcore:
        tensors = [_in_its_form(tensor, heights.get(tensor.name)) for tensor in shard.tensors]
        converted.append(shard._replace(tensors=tensors))
    return converted


def _in_its_form(tensor: OutputTensor, height: Optional[int]) -> OutputTensor:
    if height is None:
        return tensor._replace(name=with_end(tensor.name, MCORE_BIAS, BIAS))
    experts, width = tensor.shape[0] // height, tensor.shape[1]

    def stacked(begin: int, end: int) -> np.ndarray:
        return tensor.rows(begin * height, end * height).reshape(end - begin, height, width)

    return OutputTensor(tensor.name, tensor.dtype, (experts, height, width), stacked)
