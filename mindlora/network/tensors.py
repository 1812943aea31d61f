"""MindSpore tensors from NumPy arrays and back, bfloat16 included."""

import mindspore as ms
import numpy as np

from mindlora.core.numerics.dtypes import BFLOAT16, to_float32


def to_tensor(array: np.ndarray) -> ms.Tensor:
    """Returns ``array`` as a MindSpore tensor of the same dtype."""
    if array.dtype == BFLOAT16:
        return ms.Tensor(to_float32(array), ms.bfloat16)
    return ms.Tensor(np.ascontiguousarray(array))


def to_array(tensor: ms.Tensor) -> np.ndarray:
    """Returns a MindSpore tensor as an array of the same dtype; bfloat16 as mindlora.core.numerics.dtypes.BFLOAT16."""
    array = tensor.asnumpy()
    return array.view(np.uint16).view(BFLOAT16) if tensor.dtype == ms.bfloat16 else array


def fill(parameter: ms.Parameter, value: float) -> None:
    """Sets every element of a parameter to the same value."""
    # from_numpy shares the array, whereas Tensor would copy it.
    parameter.set_data(ms.Tensor.from_numpy(np.full_like(parameter.asnumpy(), value)))
