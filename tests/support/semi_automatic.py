"""MindSpore's semi-automatic parallel mode on CPUs, which it refuses there.

Its compiler knows the groups of devices of NPUs and GPUs alone: on anything else it ends with "Invalid backend". Here
its name of GPUs is that of CPUs, in the memory of this process, and the group of all GPUs that of all CPUs: sharding,
collectives and gradients are MindSpore's own. A CPU's collectives know the group of all devices, and sum and gather.
"""

import ctypes
import mmap
import re

import mindspore as ms
import mindspore.common
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.ops._grad_experimental import grad_comm_ops
from mindspore.parallel._auto_parallel_context import auto_parallel_context

from mindlora.network.cells.low_rank import TrainedRead

_LIBRARY = "libmindspore_frontend.so"
_NAMES = {b"\0GPU\0": b"\0CPU\0", b"nccl_world_group": b"mccl_world_group"}
_READ, _WRITE, _RUN = 1, 2, 4


def start() -> None:
    """Makes this process one of a semi-automatic parallel run, of as many devices as msrun has started."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    _call_cpus_gpus()
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel",
        device_num=get_group_size(),
        global_rank=get_rank(),
        full_batch=True,
        gradients_mean=False,
    )
    # MindSpore does not compare device_num with the number of GPUs then.
    auto_parallel_context()._context_handle.set_hccl_test_avaible(True)
    grad_comm_ops.ReduceScatter = _ReduceScatter
    # MindSpore's backend for CPUs runs no graph that several cells share.
    mindspore.common.lazy_inline = lambda function: function
    # As on NPUs: MindSpore would divide what is copied by its rows.
    TrainedRead.of = _without_copy


def _without_copy(self, parameter):
    return self.cast(parameter, self.dtype)


class _ReduceScatter(nn.Cell):
    """ops.ReduceScatter of all devices by their sum, of which each takes its part."""

    def __init__(self, op=ops.ReduceOp.SUM, group=""):
        super().__init__(auto_prefix=False)
        self.all_reduce = ops.AllReduce(op, group)
        self.count = get_group_size()
        self.own = Tensor(np.eye(self.count, dtype=np.float32)[get_rank()].reshape(-1, 1))

    def add_prim_attr(self, name, value):
        """Operators have it; what it sets is for NPUs."""
        return self

    def set_prim_instance_name(self, name):
        """Operators have it too."""

    def construct(self, x):
        # By a product: MindSpore makes a ReduceScatter of a sum and a slice.
        parts = self.all_reduce(x).reshape((self.count, -1))
        part = (parts * self.own).sum(0)
        return part.reshape((x.shape[0] // self.count,) + x.shape[1:])


def _call_cpus_gpus():
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/maps", encoding="ascii") as file:
        lines = [line.split() for line in file]
    for addresses, rights, *_, path in (line for line in lines if len(line) > 5):
        if not path.endswith(_LIBRARY) or not rights.startswith("r"):
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        content = ctypes.string_at(begin, end - begin)
        places = [(begin + found.start(), new) for old, new in _NAMES.items() for found in re.finditer(old, content)]
        protection = _READ | _WRITE | (_RUN if "x" in rights else 0)
        for place, new in places:
            page = place // mmap.PAGESIZE * mmap.PAGESIZE
            if libc.mprotect(ctypes.c_void_p(page), 2 * mmap.PAGESIZE, protection):
                raise OSError(ctypes.get_errno(), "mprotect")
            ctypes.memmove(place, new, len(new))
