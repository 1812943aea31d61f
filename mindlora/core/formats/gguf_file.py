"""GGUF, llama.cpp's file of tensors: written with the package gguf, one tensor after the other, in one atomic step."""

from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Tuple, Union

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import InstallationError
from mindlora.core.numerics.dtypes import to_float32

if TYPE_CHECKING:
    import gguf

ENDING = ".gguf"
F32, F16, Q8_0 = "f32", "f16", "q8_0"
# Number of elements that share a scale in q8_0.
_BLOCK = 32

Value = Union[str, bool, int, float, List[Any]]


class GgufTensor(NamedTuple):
    """A tensor to be written.

    Attributes:
        name (str): llama.cpp's name.
        shape (tuple of int): In NumPy's order; GGUF lists sizes in reverse.
        type (str): How its elements are stored: "f32", "f16" or "q8_0".
        array (callable): Returns the tensor in float32, float16 or bfloat16.
    """

    name: str
    shape: Tuple[int, ...]
    type: str
    array: Callable[[], np.ndarray]


class Uint32(int):
    """A number that the file holds without a sign, in 32 bits."""


def require_gguf() -> None:
    """Raises InstallationError if the package gguf is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise InstallationError(
            f"A GGUF file needs {error.name}, which is not installed: pip install 'mindlora[gguf]'."
        ) from None


def takes_blocks(shape: Tuple[int, ...]) -> bool:
    """Returns whether a tensor of this shape can be stored in q8_0, whose rows are cut into blocks."""
    return len(shape) > 1 and shape[-1] % _BLOCK == 0


def write(path: str, architecture: str, metadata: Dict[str, Value], tensors: List[GgufTensor]) -> None:
    """Writes a file; one tensor is in memory at a time.

    Args:
        path (str): Where to write; an existing file is replaced in one step.
        architecture (str): general.architecture.
        metadata (dict): Keys and values. A Python int becomes an int32, a Uint32 a uint32, a float a float32.
        tensors (list of GgufTensor): In the order of the file.

    Raises:
        InstallationError: The package gguf is not installed.
    """
    require_gguf()
    import gguf

    with atomic.replace_file(path) as written:
        writer = gguf.GGUFWriter(written, architecture)
        try:
            for key, value in metadata.items():
                _add(writer, key, value)
            for tensor in tensors:
                _add_info(writer, tensor)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                writer.write_tensor_data(gguf.quantize(to_float32(tensor.array()), _kind(tensor)))
        finally:
            writer.close()


def _add(writer: "gguf.GGUFWriter", key: str, value: Value) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, Uint32):
        writer.add_uint32(key, int(value))
    elif isinstance(value, int):
        writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _add_info(writer: "gguf.GGUFWriter", tensor: GgufTensor) -> None:
    import gguf

    kind = _kind(tensor)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    nbytes = int(np.prod(tensor.shape, dtype=np.int64)) // block * size
    writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=kind)


def _kind(tensor: GgufTensor) -> "gguf.GGMLQuantizationType":
    import gguf

    return gguf.GGMLQuantizationType[tensor.type.upper()]
