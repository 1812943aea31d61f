"""What a form of quantized weights is decoded from: the tensors as a checkpoint's files hold them."""

from typing import Callable, Dict, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

from mindlora.core.errors import CheckpointError
from mindlora.core.formats.safetensors_file import TensorFile, TensorInfo
from mindlora.core.numerics.dtypes import dtype_name

Shape = Tuple[int, ...]


class PackedWeight(NamedTuple):
    """A weight of a linear cell that is stored in few bits.

    Attributes:
        name (str): What it is called where it is not packed, such as model.layers.0.self_attn.q_proj.weight.
        shape (tuple): [out_channels, in_channels].
        parts (tuple of str): The tensors that it is stored as.
        form (str): In what form, for reports.
        rows (callable): (begin, end) -> float32, those rows decoded. Several threads call it at once.
        nf4 (bool): Whether its blocks are ones that mindlora's own NF4 can have: see nf4.repacked.
    """

    name: str
    shape: Shape
    parts: Tuple[str, ...]
    form: str
    rows: Callable[[int, int], np.ndarray]
    nf4: bool = False


class StoredTensors:
    """The tensors of safetensors files, with checks that name what is wrong.

    Args:
        path (str): The checkpoint, for errors.
        files (mapping): Name of a file -> the open file.
        file_of (mapping): Name of a tensor -> name of its file.

    Attributes:
        tensors (dict): Name -> TensorInfo.
    """

    def __init__(self, path: str, files: Mapping[str, TensorFile], file_of: Mapping[str, str]):
        self.path = path
        self._files = {name: files[file] for name, file in file_of.items()}
        self.tensors: Dict[str, TensorInfo] = {name: file.tensors[name] for name, file in self._files.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor as it is stored."""
        return self._files[name].read(name)

    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Returns rows [begin, end) of a tensor."""
        return self._files[name].read_rows(name, begin, end)

    def read_columns(self, name: str, begin: int, end: int) -> np.ndarray:
        """Returns columns [begin, end) of a matrix."""
        return self._files[name].read_columns(name, begin, end)

    def part(self, weight: str, *names: str) -> TensorInfo:
        """Returns the first of ``names`` that there is; raises CheckpointError if ``weight`` lacks them all."""
        there = [name for name in names if name in self.tensors]
        if not there:
            raise CheckpointError(
                f"{self.path} holds {weight} and lacks {' or '.join(names)}, without which it cannot be decoded. Copy "
                "the model again."
            )
        return self.tensors[there[0]]

    def matrix(self, name: str) -> Tuple[int, int]:
        """Returns the shape of a tensor; raises CheckpointError unless it has two axes, both above 0."""
        shape = self.tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{self.path}: {name} is {list(shape)}, which is not a matrix. Copy the model again.")
        return shape[0], shape[1]

    def check(self, name: str, shapes: Sequence[Shape], dtypes: Sequence[np.dtype], why: str) -> None:
        """Raises CheckpointError unless a tensor has one of the shapes and dtypes; ``why`` says what asks for them."""
        info = self.tensors[name]
        if info.shape in shapes and info.dtype in dtypes:
            return
        stated = " or ".join(dict.fromkeys(map(dtype_name, dtypes)))
        sizes = " or ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
        raise CheckpointError(
            f"{self.path}: {name} is {dtype_name(info.dtype)} {list(info.shape)}, and {why} needs it as {stated} "
            f"{sizes}. Copy the model again."
        )
