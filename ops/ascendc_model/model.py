"""Compiles Ascend C kernels against the functional model and runs them on NumPy arrays.

    library = build("scale_model.cpp", "scale.so")
    report = library.run("scale", [("x", x, "in"), ("y", y, "out")], tiling=struct.pack("<i", x.size), blocks=2)

The source includes the kernel's and model/python_entry.h and names kernels with ASCENDC_MODEL_KERNEL; see README.md.
"""

import ctypes
import json
import pathlib
import subprocess

INCLUDE = pathlib.Path(__file__).resolve().parent / "include"

ACCESS = {"in": 0, "inout": 1, "out": 2}
KERNEL_TYPES = ("AIV_ONLY", "AIC_ONLY", "MIX_AIV_1_0", "MIX_AIC_1_0", "MIX_AIC_1_1", "MIX_AIC_1_2")
REPORT_BYTES = 1 << 22


class KernelRefused(Exception):
    """The model refused the kernel. `report` holds what was counted until then."""

    def __init__(self, report):
        super().__init__(report["error"])
        self.report = report


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("access", ctypes.c_int32),
    ]


def build(source, target, flags=("-O1",)):
    """Compiles one C++ source to a shared library.

    Args:
        source: path of a C++ file.
        target: path of the library to write.
        flags: further flags of the compiler.

    Returns:
        Library.

    Raises:
        RuntimeError: the compiler failed; the message is its output.
    """
    # Without unique symbols, several libraries in one process keep their state apart.
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
    """Kernels compiled by `build`."""

    def __init__(self, path):
        self._run = ctypes.CDLL(str(path)).ascendc_model_run
        self._run.restype = ctypes.c_uint64

    def run(self, kernel, gm, tiling=b"", blocks=1, kernel_type="AIV_ONLY", auto_sync=True, tiling_key=0):
        """Runs a kernel on all its cores.

        Args:
            kernel: its name.
            gm: the GM arguments in order, as (name, C-contiguous array or None, "in", "inout" or "out"). What an "out"
                array holds is poisoned: bytes that the kernel does not write become 0xFF, and it may not read them.
            tiling: bytes passed as the kernel's last argument, if any.
            blocks: number of logical AI cores.
            kernel_type: one of KERNEL_TYPES.
            auto_sync: whether the compiler inserts what --cce-auto-sync inserts.
            tiling_key: what TILING_KEY_IS compares with.

        Returns:
            dict: counters: "gm" (bytes read and written by buffer), "instructions" (by pipe), "peak" (bytes by on-chip
            memory), "unwritten" (bytes by output), "cores_that_worked", and "cores" (the same by core).

        Raises:
            KernelRefused: the kernel broke a rule.
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
