"""Which implementation of an operator runs: chosen once, when a cell is made, and reported in words.

Three paths, one meaning: ``ascend`` (Ascend C kernels), ``cpu`` (C++, one shared library) and ``composed`` (plain
MindSpore operators, on any device). The environment variable MINDLORA_BACKEND forces one; what cannot be had is then an
error, never another path. Exempt is lora_dropout on an NPU, for which no Ascend kernel was written: cells drop with
nn.Dropout there. Where it is called by itself it is composed, and the report says so.
"""

import ctypes
import dataclasses
import functools
import os
from typing import Optional, Tuple

import mindspore as ms
from mindspore import ops
from mindspore.ops import CustomRegOp, DataType
from mindspore.ops.primitive import constexpr

from mindlora.errors import BackendError
from mindlora.ops import ascend

# The operators and their names in the CPU library.
OP_TYPES = {
    "lora_delta": "LoraDelta",
    "lora_dropout": "LoraDropout",
    "lora_linear": "LoraLinear",
    "multi_lora_delta": "MultiLoraDelta",
    "multi_lora_slot_write": "MultiLoraSlotWrite",
    "nf4_linear": "Nf4Linear",
}
# What they call in CANN. nf4_linear has W decoded there, and MindSpore's MatMul multiplies; None: there is no kernel.
ASCEND_OP_TYPES = {**OP_TYPES, "nf4_linear": "Nf4Dequantize", "lora_dropout": None}
OPS = tuple(OP_TYPES)
PATHS = ("ascend", "cpu", "composed")
VARIABLE = "MINDLORA_BACKEND"
# Where build.py puts it; not imported from there, or `python -m mindlora.ops.build` would import it twice.
LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "libmindlora_cpu.so")
DTYPES = (ms.float32, ms.float16, ms.bfloat16)
# The largest rank of the kernels.
MAX_RANK = 256
# Worth a call in PyNative too. A write copies r rows, where plain operators write max_rank of them, and no bfloat16; to
# drop elements by a hash takes them fifteen passes, and they decode a 4-bit weight into memory.
_ONE_PASS = {"multi_lora_slot_write": "one copy", "lora_dropout": "one pass", "nf4_linear": "4-bit weights in one pass"}
# What mindlora_library_version() of the library returns.
_LIBRARY_VERSION = 4
_COMPOSED_ON_CPU = "; 16-bit types are computed in float32 and cast back, as a CPU has no bfloat16 MatMul or Mul"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The path of one operator.

    Attributes:
        op (str): The operator.
        path (str): ascend, cpu or composed.
        reason (str): Why.
    """

    op: str
    path: str
    reason: str

    def __str__(self):
        return f"{self.op:<22}  {self.path:<8}  {self.reason}"


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """The paths of all operators, as a cell that is made now would choose them.

    Attributes:
        choices (tuple of Choice): One for each operator.
    """

    choices: Tuple[Choice, ...]

    def __str__(self):
        return "\n".join(map(str, self.choices))


def backend_report() -> BackendReport:
    """Returns which path each operator would take now, and why.

    Raises:
        BackendError: MINDLORA_BACKEND names no path, or one that cannot be had.
    """
    return BackendReport(tuple(map(choose, OPS)))


def choose(op: str) -> Choice:
    """Picks the path of an operator from MINDLORA_BACKEND, the device, the mode and the library that was built.

    Args:
        op (str): One of OPS.

    Returns:
        Choice.

    Raises:
        BackendError: MINDLORA_BACKEND names no path, or one that cannot be had. lora_dropout on an NPU is exempt.
    """
    device, forced = ms.get_context("device_target"), os.environ.get(VARIABLE, "")
    note = _COMPOSED_ON_CPU if device == "CPU" else ""
    if forced == "composed":
        return Choice(op, "composed", f"{VARIABLE} asks for it{note}")
    if forced not in ("", "ascend", "cpu"):
        raise BackendError(f"{VARIABLE} is {forced!r}: it must be one of {', '.join(PATHS)}, or unset.")
    path = forced or ("ascend" if device == "Ascend" else "cpu")
    if path == "ascend" and device == "Ascend" and ASCEND_OP_TYPES[op] is None:
        return Choice(op, "composed", f"it has no Ascend kernel, whether {VARIABLE} asks for one or not")
    problem = _ascend_problem(op, device) if path == "ascend" else _cpu_problem(device)
    if forced and problem:
        raise BackendError(f"{VARIABLE} is {forced}, but {problem}.")
    if forced:
        return Choice(op, path, f"{VARIABLE} asks for it")
    if problem:
        return Choice(op, "composed", problem + note)
    if path == "ascend":
        return Choice(op, "ascend", f"{ASCEND_OP_TYPES[op]} in Ascend C, from the operator package that CANN finds")
    if ms.get_context("mode") == ms.PYNATIVE_MODE and op not in _ONE_PASS:
        return Choice(op, "composed", f"in PyNative a call of a custom operator costs more than it saves{note}")
    return Choice(op, "cpu", f"{_ONE_PASS.get(op, 'graph mode')} on a CPU, {LIBRARY}")


def choose_for_cell(op: str, rank: int, dtype, sharded: bool) -> Choice:
    """Picks the path of an operator for one cell, which may be such that only plain operators can serve it.

    Args:
        op (str): One of OPS.
        rank (int): Of the cell's adapter.
        dtype (mindspore.dtype): In which the cell computes.
        sharded (bool): Whether the cell has a shard strategy.

    Returns:
        Choice.

    Raises:
        BackendError: MINDLORA_BACKEND names no path, or one that cannot be had for this cell.
    """
    choice, problem = choose(op), ""
    if sharded:
        problem = "the cell has a shard strategy, which fused operators cannot follow"
    elif rank > MAX_RANK:
        problem = f"rank is {rank}, and the fused operators take 1 to {MAX_RANK}"
    elif dtype not in DTYPES:
        problem = f"the cell computes in {dtype}, and the fused operators in Float32, Float16 or BFloat16"
    if choice.path == "composed" or not problem:
        return choice
    if os.environ.get(VARIABLE):
        raise BackendError(f"{VARIABLE} is {choice.path}, but {problem}.")
    return Choice(op, "composed", problem)


def _ascend_problem(op, device) -> Optional[str]:
    """Returns why the Ascend kernel of an operator cannot be used, or None."""
    if device != "Ascend":
        return f"device_target is {device}"
    return ascend.problem(ASCEND_OP_TYPES[op]) or _library_problem()


def _cpu_problem(device) -> Optional[str]:
    """Returns why the CPU library cannot be used, or None. MindSpore itself would find out at the first call."""
    if device != "CPU":
        return f"device_target is {device}"
    return _library_problem()


def _library_problem() -> Optional[str]:
    if not os.path.exists(LIBRARY):
        return f"{LIBRARY} is missing: build it with `python -m mindlora.ops.build`"
    allowed = os.environ.get("MS_CUSTOM_AOT_WHITE_LIST")
    # The test that MindSpore makes.
    if allowed is not None and os.path.realpath(allowed) not in os.path.realpath(LIBRARY):
        return f"MS_CUSTOM_AOT_WHITE_LIST ({allowed}) does not allow {LIBRARY}"
    return _load_problem(LIBRARY, os.path.getmtime(LIBRARY))


@functools.lru_cache(maxsize=None)
def _load_problem(path, _modified) -> Optional[str]:
    try:
        version = ctypes.CDLL(path).mindlora_library_version()
    except (OSError, AttributeError) as error:
        return f"{path} cannot be loaded: {error}"
    if version != _LIBRARY_VERSION:
        return (
            f"{path} is of another version of mindlora ({version}, not {_LIBRARY_VERSION}): build it again with "
            "`python -m mindlora.ops.build`"
        )
    return None


class CpuKernel(ops.Custom):
    """A function of the CPU library as a primitive, with one output.

    Shapes and types are inferred in C++, and reg_info leaves the types open: only so do dynamic shapes work.

    Args:
        name (str): The function.
        inputs (int): How many tensors it takes.
        writes (bool): Whether it writes into an input, so that what reads that input must keep its place before or
            behind it. Default: False.
    """

    def __init__(self, name, inputs, writes=False):
        self._arguments = (name, inputs, writes)
        info = CustomRegOp(f"mindlora_{name}_{inputs}")
        for i in range(inputs):
            info.input(i, f"input{i}")
        info.output(0, "output").dtype_format(*[DataType.None_None] * (inputs + 1)).target("CPU")
        super().__init__(f"{LIBRARY}:{name}", None, None, "aot", reg_info=info.get_op_info())
        if writes:
            self.add_prim_attr("side_effect_mem", True)

    def __deepcopy__(self, memo):
        # ops.Custom cannot be copied; cells that hold it are.
        return type(self)(*self._arguments)


def make_kernel(path, op, inputs, writes=False):
    """Returns the primitive of an operator on a path, None on the composed one.

    Args:
        path (str): ascend, cpu or composed.
        op (str): One of OPS.
        inputs (int): How many tensors it takes.
        writes (bool): Whether it writes into an input. Default: False.
    """
    if path == "composed":
        return None
    if path == "ascend":
        return ascend.AscendKernel(ASCEND_OP_TYPES[op], LIBRARY, writes)
    return CpuKernel(OP_TYPES[op], inputs, writes)


@constexpr
def check_dtypes(op, path, names, dtypes):
    """Raises BackendError unless all dtypes are the same and one of DTYPES. Runs when a graph is compiled."""
    for name, dtype in zip(names, dtypes):
        if dtype not in DTYPES:
            raise BackendError(f"{op} ({path}): {name} is {dtype}: it must be Float32, Float16 or BFloat16.")
        if dtype != dtypes[0]:
            raise BackendError(
                f"{op} ({path}): {name} is {dtype} and {names[0]} is {dtypes[0]}: cast them to one dtype."
            )


@functools.lru_cache(maxsize=None)
def shared_cell(kind, _path, _device):
    """Returns one cell of a kind for all the callers of a function who would make the same choice."""
    return kind()


def current_cell(kind, op):
    """Returns the cell that stands behind the function of an operator at present."""
    return shared_cell(kind, choose(op).path, ms.get_context("device_target"))
