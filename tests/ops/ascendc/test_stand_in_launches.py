"""The stand-in for CANN launches as MindSpore asks it to: an executor again, with other addresses, and from threads."""

import ctypes
import threading

import numpy as np
import pytest

from tests.support.ascendc_model import kernels

FLOAT32, UINT8, ND = 0, 4, 2


@pytest.fixture(scope="module")
def libraries(stand_in, tmp_path_factory):
    """The runtime and the operator package; kernels for float32 are where the package looks for them."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "nf4_dequantize_float32.so").symlink_to(kernels.build("nf4_dequantize", "float32")[0].path)
    runtime = ctypes.CDLL(str(stand_in["cann"] / "lib64/libascendcl.so"), ctypes.RTLD_GLOBAL)
    runtime.aclCreateTensor.restype = ctypes.c_void_p
    package = ctypes.CDLL(str(stand_in["package"] / "op_api/lib/libcust_opapi.so"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINDLORA_STAND_IN_KERNELS", str(folder))
        yield runtime, package


class Dequantized:
    """Nf4Dequantize on one row of 64 codes, the first of NF4's, so that w is -absmax * scale + offset."""

    def __init__(self, libraries, repeatable):
        self.runtime, self.package = libraries
        self.arrays = [
            np.zeros(1, np.float32),
            np.zeros((1, 32), np.uint8),
            np.full((1, 1), 2, np.uint8),
            np.ones(1, np.float32),
            np.zeros(1, np.float32),
            np.zeros((1, 64), np.float32),
        ]
        self.tensors = [self._tensor(array) for array in self.arrays]
        size, self.executor = ctypes.c_uint64(), ctypes.c_void_p()
        plan = self.package.aclnnNf4DequantizeGetWorkspaceSize
        assert plan(*self.tensors, ctypes.byref(size), ctypes.byref(self.executor)) == 0
        self.workspace = np.zeros(size.value, np.uint8)
        if repeatable:
            assert self.runtime.aclSetAclOpExecutorRepeatable(self.executor) == 0

    def _tensor(self, array):
        sizes = (ctypes.c_int64 * array.ndim)(*array.shape)
        dtype = UINT8 if array.dtype == np.uint8 else FLOAT32
        tensor = self.runtime.aclCreateTensor(sizes, array.ndim, dtype, None, 0, ND, None, 0, _address(array))
        return ctypes.c_void_p(tensor)

    def move(self, place, array):
        """Gives one of the arguments other memory."""
        self.arrays[place] = array
        address = _address(array)
        assert self.runtime.aclSetTensorAddr(self.executor, ctypes.c_size_t(place), self.tensors[place], address) == 0

    def launch(self):
        """Returns w."""
        size = ctypes.c_uint64(self.workspace.nbytes)
        assert self.package.aclnnNf4Dequantize(_address(self.workspace), size, self.executor, None) == 0
        return self.arrays[-1].copy()


def _address(array):
    return ctypes.c_void_p(array.ctypes.data)


def test_an_executor_that_may_be_repeated_is_launched_again_with_other_memory(libraries):
    call = Dequantized(libraries, repeatable=True)
    first = call.launch()
    call.move(3, np.full(1, 3, np.float32))
    call.move(5, np.zeros((1, 64), np.float32))
    np.testing.assert_array_equal(call.launch(), 3 * first)
    assert np.all(first == first[0, 0]) and first[0, 0] != 0


def test_launches_of_several_threads_follow_each_other(libraries):
    calls = [Dequantized(libraries, repeatable=False) for _ in range(8)]
    for number, call in enumerate(calls):
        call.arrays[3][:] = number
    threads = [threading.Thread(target=call.launch) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unit = calls[1].arrays[-1]
    assert unit.any()
    for number, call in enumerate(calls):
        np.testing.assert_array_equal(call.arrays[-1], number * unit)
