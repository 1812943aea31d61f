"""Reads checkpoints of MindFormers 2's PyNative trainer with mcore's names and shapes, from which they differ twice.

Its weights of a layer's experts have three axes, [experts, in, out], and mcore's two, [experts * in, out]. Its bias of
a router is stored beside the router, not in it.
"""

import math
from typing import Dict, Tuple, Union

import numpy as np

from mindlora.core.formats.safetensors_file import TensorFile, TensorInfo
from mindlora.core.formats.step_folder import StepFolder
from mindlora.models import names

BIAS = ".mlp.expert_bias"
MCORE_BIAS = ".mlp.router.expert_bias"


class McoreView:
    """A file of the trainer under mcore's names and shapes, with the interface of TensorFile.

    Args:
        file (TensorFile or StepFolder): The open file, which is closed with the view.

    Attributes:
        tensors (dict): Name -> TensorInfo.
        metadata (dict): The strings in the file's header.
        experts (dict): Name of an expert weight -> its sizes (experts, in, out).
    """

    def __init__(self, file: Union[TensorFile, StepFolder]):
        self._file = file
        self.metadata = file.metadata
        self.tensors: Dict[str, TensorInfo] = {}
        self.experts: Dict[str, Tuple[int, ...]] = {}
        self._names: Dict[str, str] = {}
        for stored, info in file.tensors.items():
            name = with_end(stored, BIAS, MCORE_BIAS)
            if _is_stack(stored, info):
                self.experts[name] = info.shape
                info = info._replace(shape=(math.prod(info.shape[:2]), info.shape[2]))
            self.tensors[name] = info
            self._names[name] = stored

    def __enter__(self) -> "McoreView":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Returns rows [begin, end) of a tensor along its first axis."""
        stored = self._names[name]
        if name not in self.experts:
            return self._file.read_rows(stored, begin, end)
        _, height, width = self.experts[name]
        first = begin // height
        stack = self._file.read_rows(stored, first, -(-end // height))
        return stack.reshape(-1, width)[begin - first * height : end - first * height]


def has_its_names(file: Union[TensorFile, StepFolder]) -> bool:
    """Returns whether a file holds a tensor that the trainer names or stacks differently from mcore."""
    return any(name.endswith(BIAS) or _is_stack(name, info) for name, info in file.tensors.items())


def with_end(name: str, end: str, other: str) -> str:
    """Returns ``name`` with its end replaced, if it has that end."""
    return name[: -len(end)] + other if name.endswith(end) else name


def _is_stack(name: str, info: TensorInfo) -> bool:
    return len(info.shape) == 3 and names.is_expert_weight(name)
