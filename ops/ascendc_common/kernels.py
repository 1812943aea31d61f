"""Runs the Ascend C kernels of the operators in the functional model, on NumPy arrays.

    y, report = kernels.run("lora_delta", "float16", inputs, output, sizes)

Each kernel is compiled once for a dtype, as CANN does it, from <op>/ascendc/model.cpp. A functional model, not an NPU.
"""

import ctypes
import functools
import importlib.util
import pathlib
import tempfile

import numpy as np

OPS = pathlib.Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("ascendc_model", OPS / "ascendc_model" / "model.py")
model = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(model)

# What the kernels' sources call the dtypes.
ELEMENTS = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
KINDS = ("AIV_ONLY", "MIX_AIV_1_0", "MIX_AIC_1_2")
# Of the largest 910B; a smaller number shows that a kernel does not depend on it.
CUBE_CORES, VECTOR_CORES = 24, 48
_TILING_BYTES = 4096


class _Plan(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("tiling_key", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("tiling_bytes", ctypes.c_uint64),
    ]


@functools.lru_cache(maxsize=None)
def build(op, dtype):
    """Returns (library, its plan function) of an operator for a dtype, a name in ELEMENTS."""
    folder = tempfile.mkdtemp(prefix=f"mindlora_{op}_")
    target = f"{folder}/{op}_{dtype}.so"
    library = model.build(
        OPS / op / "ascendc" / "model.cpp", target, ("-O2", f"-I{OPS}", f"-DMINDLORA_ELEMENT={ELEMENTS[dtype]}")
    )
    return library, ctypes.CDLL(target).mindlora_plan


def plan(op, dtype, sizes, cube_cores=CUBE_CORES, vector_cores=VECTOR_CORES):
    """Returns (plan, tiling as bytes) for sizes as the operator's plan takes them."""
    result, tiling = _Plan(), ctypes.create_string_buffer(_TILING_BYTES)
    build(op, dtype)[1](
        (ctypes.c_int64 * len(sizes))(*sizes),
        ctypes.c_uint32(cube_cores),
        ctypes.c_uint32(vector_cores),
        ctypes.byref(result),
        tiling,
    )
    return result, tiling.raw[: result.tiling_bytes]


def run(op, dtype, inputs, outputs, sizes, cube_cores=CUBE_CORES, vector_cores=VECTOR_CORES):
    """Runs an operator.

    Args:
        op: folder of the operator.
        dtype: a name in ELEMENTS.
        inputs: (name, C-contiguous array) in the kernel's order.
        outputs: (name, array, "out" or "inout") in the kernel's order; they are written.
        sizes: what the operator's plan takes.
        cube_cores, vector_cores: of the chip.

    Returns:
        dict: the model's report, with "workspace" among its buffers.

    Raises:
        KernelRefused: the kernel broke a rule.
    """
    made, tiling = plan(op, dtype, sizes, cube_cores, vector_cores)
    workspace = np.empty(max(made.workspace, 32), np.uint8)
    memory = [(name, array, "in") for name, array in inputs] + list(outputs) + [("workspace", workspace, "out")]
    return build(op, dtype)[0].run(
        op, memory, tiling=tiling, blocks=made.blocks, kernel_type=KINDS[made.kind], tiling_key=made.tiling_key
    )
