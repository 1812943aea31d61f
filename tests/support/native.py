"""Calls the CPU library's functions the way MindSpore does, but without MindSpore, with guards around every tensor."""

import contextlib
import ctypes
import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from tests.support.op_paths import PATHS
from tests.support.operator_process import EMULATOR, LIBRARY, OperatorProcess

DTYPES = ("float32", "float16", "bfloat16")
# Half a unit in the last place, relative: the largest error of rounding a float32 result to the dtype.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "int32": 0}
_GUARD = 64


@functools.lru_cache(maxsize=None)
def library():
    """The library that MindSpore loads too: one handle in the process. With an emulator, the one that it runs."""
    return OperatorProcess() if EMULATOR else ctypes.CDLL(LIBRARY)


def rounded(array, dtype):
    """Returns the values that ``array`` has once it is stored in a dtype, as float32."""
    array = np.asarray(array, np.float32)
    if dtype == "float16":
        return array.astype(np.float16).astype(np.float32)
    return _decode(_encode(array, dtype), dtype)


def _encode(array, dtype):
    """Returns a float32 array as it is stored: bfloat16 as the upper halves of float32."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(array, dtype)
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return np.where(np.isnan(array), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _decode(stored, dtype):
    if dtype != "bfloat16":
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def guarded(array, dtype):
    """Returns (whole, inner): ``array`` as it is stored, between elements that would spoil any sum they got into."""
    stored = _encode(array, dtype)
    largest = {"int32": 2**30, "uint8": 255}
    poison = np.full(_GUARD, largest[dtype], dtype) if dtype in largest else _encode(np.full(_GUARD, np.nan), dtype)
    whole = np.concatenate([poison, stored.reshape(-1), poison])
    return whole, whole[_GUARD : len(whole) - _GUARD].reshape(stored.shape)


def _invoke(name, memory, dtypes):
    """Calls a function on guarded tensors, of which the last is the output, and asserts that it succeeds."""
    if EMULATOR:
        answer = library().call(name, [(*tensor, dtype) for tensor, dtype in zip(memory, dtypes)])
        shape = "".join(f" {dimension}" for dimension in memory[-1][1].shape)
        assert (answer.shape, answer.code) == (f"shape{shape}", "code 0")
        assert dtypes[int(answer.type.split()[1])] == dtypes[-1]
        return
    count = len(memory)
    shapes = [(ctypes.c_int64 * max(1, inner.ndim))(*inner.shape) for _, inner in memory]
    code = getattr(library(), name)(
        count,
        (ctypes.c_void_p * count)(*[inner.ctypes.data for _, inner in memory]),
        (ctypes.c_int * count)(*[inner.ndim for _, inner in memory]),
        (ctypes.POINTER(ctypes.c_int64) * count)(*[ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in shapes]),
        (ctypes.c_char_p * count)(*[dtype.encode() for dtype in dtypes]),
        None,
        None,
    )
    assert code == 0


def call(name, inputs, out_shape, out_dtype, in_place=0):
    """Calls a function of the library on an output full of NaN, and asserts that it writes nothing around a tensor.

    Args:
        name (str): The function.
        inputs (list): (array, dtype) of each input.
        out_shape (tuple): Shape of the output.
        out_dtype (str): dtype of the output.
        in_place (int): How many of the first inputs the function writes to. Default: 0.

    Returns:
        ndarray, the output as float32 (int32 stays int32); with in_place a list: the inputs, then the output.
    """
    start = np.zeros(out_shape, np.int32) if out_dtype == "int32" else np.full(out_shape, np.nan, np.float32)
    tensors, dtypes = [*inputs, (start, out_dtype)], [dtype for _, dtype in inputs] + [out_dtype]
    memory = [guarded(array, dtype) for array, dtype in tensors]
    before = [whole.tobytes() for whole, _ in memory]
    _invoke(name, memory, dtypes)
    for i, ((whole, _), bytes_before) in enumerate(zip(memory, before)):
        size = _GUARD * whole.itemsize
        bytes_after = whole.tobytes()
        assert bytes_after[:size] == bytes_before[:size] and bytes_after[-size:] == bytes_before[-size:], (
            f"{name} wrote outside of tensor {i}"
        )
        assert i < in_place or i == len(memory) - 1 or bytes_after == bytes_before, f"{name} changed input {i}"
    results = [inner if dtype == "int32" else _decode(inner, dtype) for (_, inner), dtype in zip(memory, dtypes)]
    return results[:in_place] + results[-1:] if in_place else results[-1]


def tensor(array, dtype):
    """Returns a Tensor of a dtype by name."""
    return Tensor(np.asarray(array), getattr(ms, dtype))


def values(result):
    """Returns a Tensor as float32; NumPy has no bfloat16."""
    return ops.cast(result, ms.float32).asnumpy()


def normal(*shape, seed=0, dtype="float32"):
    """Returns normal values that the dtype can hold."""
    return rounded(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def assert_near(actual, expected, dtype, terms=1, what=""):
    """Asserts that a result is the float64 oracle, rounded to its dtype, up to the error of float32 sums.

    Args:
        actual (ndarray): The result.
        expected (ndarray): The oracle.
        dtype (str): dtype of the result.
        terms (int): How many products of numbers of size 1 are summed. Default: 1.
        what (str): What the result is of, for the message. Default: "".
    """
    assert actual.shape == expected.shape, what
    # An NPU's cube multiplies 16-bit numbers: the low-rank rows are rounded before they meet B.
    cube = ROUNDING[dtype] if PATHS[0] == "ascend" and dtype != "float32" else 0
    near = (4e-7 + cube) * max(1, terms)
    np.testing.assert_allclose(actual, expected, rtol=1.01 * ROUNDING[dtype], atol=near, err_msg=what)


@contextlib.contextmanager
def refused_by_kernel(message=None):
    """Asserts that a kernel which MindSpore runs raises an error with ``message``, a pattern, in it.

    In PyNative further kernels may wait behind the one that failed. Unless their errors are waited for too, MindSpore
    raises each wherever the next operator is called, which would be in another test.
    """
    with pytest.raises(RuntimeError, match=message) as error:
        yield error
    for _ in range(10):
        with contextlib.suppress(RuntimeError):
            ms.runtime.synchronize()
            break
