"""The simulator's Python side: compiles Ascend C kernels against its headers and runs them on NumPy arrays.

    library = build("scale_model.cpp", "scale.so")
    report = library.run("scale", [("x", x, "in"), ("y", y, "out")], tiling=struct.pack("<i", x.size), blocks=2)

The source includes that of the kernel and model/python_entry.h, and names the kernel with ASCENDC_MODEL_KERNEL; see
README.md.
"""

import ctypes
import json
import pathlib
import subprocess
from typing import Any, Dict, Optional, Sequence, Tuple, Union

import numpy as np

INCLUDE = pathlib.Path(__file__).resolve().parent / "include"

ACCESS = {"in": 0, "inout": 1, "out": 2}
KERNEL_TYPES = ("AIV_ONLY", "AIC_ONLY", "MIX_AIV_1_0", "MIX_AIC_1_0", "MIX_AIC_1_1", "MIX_AIC_1_2")
REPORT_BYTES = 1 << 22


class KernelRefused(Exception):
    """The kernel broke a rule. `report` has the message and what was counted until then."""

    def __init__(self, report: Dict[str, Any]):
        super().__init__(report["error"])
        self.report = report


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("access", ctypes.c_int32),
    ]


def build(
    source: Union[str, pathlib.Path], target: Union[str, pathlib.Path], flags: Sequence[str] = ("-O1",)
) -> "Library":
    """Compiles one C++ source into a shared library.

    Args:
        source: Path of a C++ file.
        target: Path of the library to write.
        flags: Further flags of the compiler.

    Returns:
        The library, loaded.

    Raises:
        RuntimeError: The compiler failed; its output is in the message.
    """
    # -fno-gnu-unique: with unique symbols, several libraries in one process would share the simulator's state.
    command = [
        "g++",
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-fno-gnu-unique",
        f"-I{INCLUDE}",
        *flags,
        str(source),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return Library(target)


class Library:
    """Kernels compiled by `build`. `path` is the shared library."""

    def __init__(self, path: Union[str, pathlib.Path]):
        self.path = str(path)
        self._run = ctypes.CDLL(self.path).ascendc_model_run
        self._run.restype = ctypes.c_uint64

    def run(
        self,
        kernel: str,
        gm: Sequence[Tuple[str, Optional[np.ndarray], str]],
        tiling: bytes = b"",
        blocks: int = 1,
        kernel_type: str = "AIV_ONLY",
        auto_sync: bool = True,
        tiling_key: int = 0,
    ) -> Dict[str, Any]:
        """Runs a kernel on all of its cores.

        Args:
            kernel: Its name.
            gm: The arguments in global memory, in order: (name, C-contiguous array or None, "in", "inout" or "out").
                An "out" array is poisoned: bytes that the kernel does not write become 0xFF, and it may not read them.
            tiling: Bytes passed as the kernel's last argument, if any.
            blocks: Number of logical AI cores.
            kernel_type: One of KERNEL_TYPES.
            auto_sync: Whether the compiler inserts what --cce-auto-sync inserts.
            tiling_key: What TILING_KEY_IS compares with.

        Returns:
            Counters: "gm" (bytes read and written, by buffer), "instructions" (by pipe), "peak" (bytes, by on-chip
            memory), "unwritten" (bytes, by output), "cores_that_worked", and "cores" (instructions, gm and peak of each
            core).

        Raises:
            KernelRefused: The kernel broke a rule.
        """
        buffers = (_Buffer * len(gm))(
            *[
                _Buffer(
                    name.encode(),
                    None if array is None else array.ctypes.data,
                    0 if array is None else array.nbytes,
                    ACCESS[access],
                )
                for name, array, access in gm
            ]
        )
        text = ctypes.create_string_buffer(REPORT_BYTES)
        self._run(
            kernel.encode(),
            buffers,
            ctypes.c_uint32(len(gm)),
            tiling,
            ctypes.c_uint64(len(tiling)),
            ctypes.c_uint32(blocks),
            KERNEL_TYPES.index(kernel_type),
            int(auto_sync),
            ctypes.c_uint64(tiling_key),
            text,
            ctypes.c_uint64(REPORT_BYTES),
        )
        report = json.loads(text.value)
        if not report["ok"]:
            raise KernelRefused(report)
        return report
