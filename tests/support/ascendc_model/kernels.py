"""Runs the Ascend C kernels of the operators in the simulator, on NumPy arrays. Not on an NPU.

    report = kernels.run("lora_delta", "float16", inputs, outputs, sizes)

Each kernel is compiled once for each dtype, as CANN does, from operators/<op>.cpp. build/ascendc_model keeps what was
compiled, for all processes, until a source changes.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
from typing import Any, Callable, Dict, Sequence, Tuple

import numpy as np

from tests.support.ascendc_model import model

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OPS = ROOT / "ops"

# The dtypes as the kernels' sources call them.
ELEMENTS = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
KINDS = ("AIV_ONLY", "MIX_AIV_1_0", "MIX_AIC_1_2")
# The cores of the largest 910B. Tests also run with fewer, to show that no kernel depends on the number.
CUBE_CORES, VECTOR_CORES = 24, 48
_TILING_BYTES = 4096
_BUILT = ROOT / "build" / "ascendc_model"
_FLAGS = ("-O1",)


class _Plan(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("tiling_key", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("tiling_bytes", ctypes.c_uint64),
    ]


@functools.lru_cache(maxsize=None)
def build(op: str, dtype: str) -> Tuple[Any, Callable]:
    """Returns the library of an operator for a dtype, a name in ELEMENTS, and its plan function."""
    _BUILT.mkdir(parents=True, exist_ok=True)
    name = f"{op}_{dtype}"
    target = _BUILT / f"{name}_{_digest(op)}.so"
    with open(_BUILT / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(op, dtype, target)
            for other in _BUILT.glob(f"{name}_*.so"):
                if other != target:
                    other.unlink()
    return model.Library(target), ctypes.CDLL(str(target)).mindlora_plan


def _compile(op: str, dtype: str, target: pathlib.Path) -> None:
    """Compiles the kernel of an operator for a dtype, and puts it into place when it is whole."""
    unfinished = target.with_suffix(".unfinished")
    flags = (*_FLAGS, f"-I{OPS}", f"-DMINDLORA_ELEMENT={ELEMENTS[dtype]}")
    model.build(HERE / "operators" / f"{op}.cpp", unfinished, flags)
    os.replace(unfinished, target)


def _digest(op: str) -> str:
    """Returns a digest of all that the kernel of an operator is compiled from."""
    whole = hashlib.sha256(repr(_FLAGS).encode())
    for folder in (OPS / "ascendc_common", HERE, OPS / op / "ascendc"):
        for path in sorted([*folder.rglob("*.h"), *folder.rglob("*.cpp")]):
            whole.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return whole.hexdigest()[:16]


def plan(
    op: str, dtype: str, sizes: Sequence[int], cube_cores: int = CUBE_CORES, vector_cores: int = VECTOR_CORES
) -> Tuple[_Plan, bytes]:
    """Returns (plan, tiling as bytes) for the sizes that the operator's plan takes (operators/<op>.cpp lists them)."""
    result, tiling = _Plan(), ctypes.create_string_buffer(_TILING_BYTES)
    build(op, dtype)[1](
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_uint32(cube_cores),
        ctypes.c_uint32(vector_cores),
        ctypes.byref(result),
        tiling,
    )
    return result, tiling.raw[: result.tiling_bytes]


def run(
    op: str,
    dtype: str,
    inputs: Sequence[Tuple[str, np.ndarray]],
    outputs: Sequence[Tuple[str, np.ndarray, str]],
    sizes: Sequence[int],
    cube_cores: int = CUBE_CORES,
    vector_cores: int = VECTOR_CORES,
) -> Dict[str, Any]:
    """Runs an operator's kernel as its plan launches it.

    Args:
        op: Folder of the operator.
        dtype: A name in ELEMENTS.
        inputs: (name, C-contiguous array), in the kernel's order.
        outputs: (name, array, "out" or "inout"), in the kernel's order; the kernel writes them.
        sizes: What the operator's plan takes.
        cube_cores, vector_cores: Of the chip.

    Returns:
        The simulator's report (Library.run), with "workspace" among its buffers.

    Raises:
        KernelRefused: The kernel broke a rule.
    """
    made, tiling = plan(op, dtype, sizes, cube_cores, vector_cores)
    workspace = np.empty(max(made.workspace, 32), np.uint8)
    memory = [(name, array, "in") for name, array in inputs] + list(outputs) + [("workspace", workspace, "out")]
    return build(op, dtype)[0].run(
        op, memory, tiling=tiling, blocks=made.blocks, kernel_type=KINDS[made.kind], tiling_key=made.tiling_key
    )
