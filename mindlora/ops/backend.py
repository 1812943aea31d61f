"""Chooses the implementation of an operator once, when a cell is created, and reports the choice.

Three paths compute the same result: ``ascend`` (Ascend C kernels), ``cpu`` (C++, one shared library) and ``composed``
(plain MindSpore operators, on any device). The environment variable MINDLORA_BACKEND forces one; if that path is not
available, it is an error without a fallback. MINDLORA_BACKEND_<OPERATOR>, such as MINDLORA_BACKEND_LORA_DELTA,
does so for one operator and has priority. On an NPU two are exempt, because they have no Ascend kernel of their own:
for lora_dropout cells use nn.Dropout, and a direct call takes the composed path, as the report shows; multi_lora_linear
is MindSpore's product and the kernel of multi_lora_delta. The operators in CPU_ONLY are exempt too: they
replace MindSpore's own, which have kernels for NPUs only, so they have the cpu path or none.
"""

import ctypes
import dataclasses
import functools
import os
from typing import Optional, Tuple

import mindspore as ms
from mindspore.common import dtype as mstype

from mindlora.core.errors import BackendError
from mindlora.core.operator_library import LIBRARY, file_problem
from mindlora.ops import ascend
from mindlora.ops.measured import measured

# The operators and their names in the CPU library.
OP_TYPES = {
    "lora_delta": "LoraDelta",
    "lora_dropout": "LoraDropout",
    "lora_linear": "LoraLinear",
    "masked_attention": "MaskedAttention",
    "multi_lora_delta": "MultiLoraDelta",
    "multi_lora_linear": "MultiLoraLinear",
    "multi_lora_slot_write": "MultiLoraSlotWrite",
    "nf4_linear": "Nf4Linear",
    "rms_norm": "RmsNorm",
    "routed_experts": "RoutedExperts",
    "rotary_embedding": "RotaryEmbedding",
    "rounded_linear": "RoundedLinear",
    "paged_attention": "PagedAttention",
    "frozen_linear": "FrozenLinear",
    "integer_linear": "Int4Linear",
}
# Operators with only the cpu path, and MindSpore's own operators that do the same on an NPU.
CPU_ONLY = {
    "masked_attention": "FlashAttentionScore",
    "rms_norm": "RmsNorm",
    "routed_experts": "GroupedMatmul",
    "rotary_embedding": "ApplyRotaryPosEmb",
    "rounded_linear": "MatMul",
    "paged_attention": "PagedAttention with ReshapeAndCache",
    "frozen_linear": "MatMul",
    "integer_linear": "MatMul",
}
# The kernel of each in CANN, or None. nf4_linear's decodes W, and MindSpore's MatMul multiplies.
ASCEND_OP_TYPES = {
    **OP_TYPES,
    "nf4_linear": "Nf4Dequantize",
    "lora_dropout": None,
    "multi_lora_linear": None,
    **dict.fromkeys(CPU_ONLY),
}
OPS = tuple(OP_TYPES)
PATHS = ("ascend", "cpu", "composed")
VARIABLE = "MINDLORA_BACKEND"
DTYPES = (ms.float32, ms.float16, ms.bfloat16)
# The largest rank of the kernels.
MAX_RANK = 256
# Operators whose kernel pays off in PyNative too. Plain operators write max_rank rows of a slot where r would
# do, and cannot write bfloat16; they take fifteen passes for dropout by a hash; they decode a 4-bit weight into memory.
_ONE_PASS = {"multi_lora_slot_write": "one copy", "lora_dropout": "one pass", "nf4_linear": "4-bit weights in one pass"}
# The result of the library's mindlora_library_version().
_LIBRARY_VERSION = 16
# Its number in ops/cpu_common/isa.h.
_AVX512_BF16 = 3
# The tokens of a short prompt, or of a training step with few rows: lora_linear takes decode.
TOKENS_OF_A_CELL = 512
# The margin by which a kernel's estimate must beat that of plain operators, which ignores their launches.
FAR_ABOVE = 1.25
_COMPOSED_ON_CPU = "; 16-bit types are computed in float32 and cast back, as a CPU has no bfloat16 MatMul or Mul"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The path of one operator.

    Attributes:
        op (str): The operator.
        path (str): ascend, cpu or composed; "none" for an operator of CPU_ONLY that cannot run here.
        reason (str): The reason for the choice.
    """

    op: str
    path: str
    reason: str

    def __str__(self):
        return f"{self.op:<22}  {self.path:<8}  {self.reason}"


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """The path of each operator that would be picked for a cell created now.

    Attributes:
        choices (tuple of Choice): One for each operator.
    """

    choices: Tuple[Choice, ...]

    def __str__(self):
        return "\n".join(map(str, self.choices))


def backend_report() -> BackendReport:
    """Returns the path that would be picked for each operator now, and why.

    Raises:
        BackendError: MINDLORA_BACKEND names a path that is unknown or not available.
    """
    return BackendReport(tuple(map(choose, OPS)))


def choose(op: str) -> Choice:
    """Picks the path of an operator by MINDLORA_BACKEND, device, mode and whether the library was built.

    Raises:
        BackendError: MINDLORA_BACKEND names a path that is unknown or not available (except for lora_dropout
            and multi_lora_linear on an NPU, and for those of CPU_ONLY).
    """
    device, (variable, forced) = ms.get_context("device_target"), _asked(op)
    note = _COMPOSED_ON_CPU if device == "CPU" else ""
    if forced not in ("", *PATHS):
        raise BackendError(f"{variable} is {forced!r}: it must be one of {', '.join(PATHS)}, or unset.")
    if op in CPU_ONLY:
        return _cpu_or_none(op, device)
    if forced == "composed":
        return Choice(op, "composed", f"{variable} asks for it{note}")
    path = forced or ("ascend" if device == "Ascend" else "cpu")
    if path == "ascend" and device == "Ascend" and ASCEND_OP_TYPES[op] is None:
        return Choice(op, "composed", f"it has no Ascend kernel, even if {variable} asks for one")
    problem = _ascend_problem(op, device) if path == "ascend" else _cpu_problem(device)
    if forced and problem:
        raise BackendError(f"{variable} is {forced}, but {problem}. Unset it, or set it to composed.")
    if problem:
        return Choice(op, "composed", problem + note)
    asked = f"{variable} asks for it" if forced else ""
    if path == "ascend":
        adopted = None if forced else measured()
        if adopted and op in adopted.composed:
            return Choice(op, "composed", f"as measured on {adopted.machine}: {adopted.composed[op]}")
        why = asked or f"{ASCEND_OP_TYPES[op]} in Ascend C, from the operator package that CANN finds"
        return Choice(op, path, f"{why}; {ascend.describe(LIBRARY)}")
    if forced:
        return Choice(op, path, asked)
    if ms.get_context("mode") == ms.PYNATIVE_MODE and op not in _ONE_PASS:
        return Choice(op, "composed", f"in PyNative a call to a custom operator costs more than it saves{note}")
    return Choice(op, "cpu", f"{_ONE_PASS.get(op, 'graph mode')} on a CPU, {LIBRARY}")


def choose_for_cell(
    op: str, rank: int, dtype: mstype.Type, sharded: bool, channels: Optional[Tuple[int, int]] = None
) -> Choice:
    """Picks the path of an operator for one cell: the composed one if no kernel supports the cell, or is slower.

    Raises BackendError if MINDLORA_BACKEND names a path that is unknown or not available for this cell. ``dtype`` is
    the cell's compute dtype; with ``sharded`` the cell has a shard strategy. ``channels`` are lora_delta's (in, out),
    which decide between its kernel and plain operators on an NPU.
    """
    choice = choose(op)
    problem = ""
    if sharded:
        problem = "the cell has a shard strategy, which fused operators cannot follow"
    elif rank > MAX_RANK:
        problem = f"rank is {rank}, and the fused operators take 1 to {MAX_RANK}"
    elif dtype not in DTYPES:
        problem = f"the cell computes in {dtype}, and the fused operators in Float32, Float16 or BFloat16"
    variable, forced = _asked(op)
    if not problem and not forced and choice.path == "ascend" and channels is not None:
        problem = _slow_on_ascend(*channels, rank, dtype)
    if choice.path == "composed" or not problem:
        return choice
    if forced:
        raise BackendError(f"{variable} is {choice.path}, but {problem}. Unset it, or set it to composed.")
    return Choice(op, "composed", problem)


def lora_delta_times(
    tokens: int, in_channels: int, out_channels: int, rank: int, element_bytes: int
) -> Tuple[int, ...]:
    """Returns estimates of lora_delta's shortest time on an Atlas A2, in bytes that its memory moves meanwhile.

    An adopted measurement of a core's bandwidth counts.

    Args:
        tokens, in_channels, out_channels, rank (int): The sizes.
        element_bytes (int): 4 for float32, 2 for float16 and bfloat16.

    Returns:
        tuple of int, (the least possible, the kernel by its plan's estimate, plain operators).
    """
    times = (ctypes.c_uint64 * 3)()
    adopted = measured()
    draw = adopted.draw_tenths if adopted else None
    sizes = map(ctypes.c_uint64, (tokens, in_channels, out_channels, rank, element_bytes, draw or 0))
    _open(LIBRARY, os.path.getmtime(LIBRARY)).mindlora_lora_delta_times(*sizes, times)
    return tuple(times)


def _slow_on_ascend(in_channels, out_channels, rank, dtype) -> str:
    """Returns why plain operators are faster on an NPU, or ""."""
    element_bytes = 4 if dtype == ms.float32 else 2
    least, kernel, composed = lora_delta_times(TOKENS_OF_A_CELL, in_channels, out_channels, rank, element_bytes)
    if kernel <= FAR_ABOVE * composed:
        return ""
    return (
        f"for {in_channels} to {out_channels} channels, rank {rank} and {TOKENS_OF_A_CELL} tokens in {dtype} the "
        f"kernel is estimated at {kernel / least:.1f} times the time of its bytes, and plain operators at "
        f"{composed / least:.1f}"
    )


def multiplies_bfloat16() -> bool:
    """Returns whether this processor has instructions that multiply bfloat16, AVX512_BF16; the library must be there.

    Without them rounded_linear is correct but no faster than products in float32; with NF4 it is slower.
    """
    return _best_isa() >= _AVX512_BF16


def rounds_faster() -> bool:
    """Returns whether rounded_linear is faster than products in float32 for any number of tokens; as above.

    With AVX512_BF16 on processors of AMD it is. Those with AMX, which are Intel's, multiply bfloat16 at half that rate
    without it, and take 1.09 to 1.26 of the time of float32 for 8 to 64 tokens.
    """
    return _best_isa() == _AVX512_BF16


def _best_isa():
    """Returns the number of the newest instruction set that both this processor and the library have."""
    return _open(LIBRARY, os.path.getmtime(LIBRARY)).mindlora_best_isa()


def switch(op: str) -> str:
    """Returns the environment variable that forces the path of one operator, MINDLORA_BACKEND_<OPERATOR>."""
    return f"{VARIABLE}_{op.upper()}"


def _asked(op):
    """Returns the variable that applies to an operator, and the path that it names, "" if there is none."""
    variable = switch(op) if os.environ.get(switch(op)) else VARIABLE
    return variable, os.environ.get(variable, "")


def _cpu_or_none(op, device) -> Choice:
    """Returns the choice for an operator of CPU_ONLY, which MINDLORA_BACKEND does not change."""
    if device == "Ascend":
        return Choice(op, "none", f"on an NPU MindSpore's own {CPU_ONLY[op]} runs")
    problem = _cpu_problem(device)
    return Choice(op, "none", problem) if problem else Choice(op, "cpu", f"it has no other path, {LIBRARY}")


def _ascend_problem(op, device) -> Optional[str]:
    """Returns why the Ascend kernel of an operator cannot be used, or None."""
    if device != "Ascend":
        return f"device_target is {device}"
    return ascend.problem(ASCEND_OP_TYPES[op]) or _library_problem()


def _cpu_problem(device) -> Optional[str]:
    """Returns why the CPU library cannot be used, or None. MindSpore itself would notice only at the first call."""
    if device != "CPU":
        return f"device_target is {device}"
    return _library_problem()


def _library_problem() -> Optional[str]:
    return file_problem(LIBRARY) or _load_problem(LIBRARY, os.path.getmtime(LIBRARY))


@functools.lru_cache(maxsize=None)
def _open(path, _modified) -> ctypes.CDLL:
    """Opens the library for as long as the process lives.

    In PyNative, MindSpore opens and closes it twice at every call, to infer shape and type, and on an NPU nothing else
    keeps it open. Opened early, it also gets thread-local storage, of which aarch64 has little.
    """
    return ctypes.CDLL(path)


@functools.lru_cache(maxsize=None)
def _load_problem(path, modified) -> Optional[str]:
    try:
        version = _open(path, modified).mindlora_library_version()
    except (OSError, AttributeError) as error:
        cure = "; start Python with LD_PRELOAD=libgomp.so.1" if "static TLS" in str(error) else ""
        return f"{path} cannot be loaded: {error}{cure}"
    if version != _LIBRARY_VERSION:
        return (
            f"{path} is from another version of mindlora ({version}, not {_LIBRARY_VERSION}): build it again with "
            "`python -m mindlora.ops.build`"
        )
    return None
