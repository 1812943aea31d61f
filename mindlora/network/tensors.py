"""MindSpore tensors from NumPy arrays and back, bfloat16 included."""

import mindspore as ms
import numpy as np
from mindspore.common import np_dtype
from mindspore.common.initializer import initializer
from mindspore.nn.utils import no_init_parameters

from mindlora.core.numerics.dtypes import BFLOAT16


def to_tensor(array: np.ndarray) -> ms.Tensor:
    """Returns a copy of ``array`` as a MindSpore tensor of the same dtype."""
    return ms.Tensor(np.ascontiguousarray(_for_mindspore(array)))


def as_tensor(array: np.ndarray) -> ms.Tensor:
    """Returns a MindSpore tensor of the same dtype in the memory of ``array``.

    An array that is not contiguous, not aligned or cannot be written to is copied.
    """
    return ms.Tensor.from_numpy(np.require(_for_mindspore(array), requirements=("C", "W", "A")))


def _for_mindspore(array):
    # MindSpore has its own bfloat16 for NumPy, with the same bits.
    return array.view(np_dtype.bfloat16) if array.dtype == BFLOAT16 else array


def to_array(tensor: ms.Tensor) -> np.ndarray:
    """Returns a MindSpore tensor as an array of the same dtype; bfloat16 as mindlora.core.numerics.dtypes.BFLOAT16."""
    array = tensor.asnumpy()
    return array.view(np.uint16).view(BFLOAT16) if tensor.dtype == ms.bfloat16 else array


def twin(parameter: ms.Parameter, name: str) -> ms.Parameter:
    """Returns a frozen parameter in the memory of another one that has values, on a CPU."""
    with no_init_parameters():
        made = ms.Parameter(initializer("zeros", parameter.shape, parameter.dtype), name=name, requires_grad=False)
    made.set_data(as_tensor(to_array(parameter)))
    return made


def fill(parameter: ms.Parameter, value: float) -> None:
    """Sets every element of a parameter to the same value."""
    parameter.set_data(as_tensor(np.full_like(parameter.asnumpy(), value)))
