"""Checks the mindlora that scripts/release.sh installed: `python release_check.py PACKAGE`, a wheel or source archive.

It must be this version, hold the YAMLs of configs/ and a library (byte for byte the wheel's), and compute an operator
on the CPU as NumPy does. The reference comes from the checkout, everything else from the installed package.
"""

import os
import re
import runpy
import subprocess
import sys
import time
import zipfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# Half a unit in the last place, relative to the largest output; float32's bound allows for another order of sums.
TOLERANCES = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def check(holds: bool, message: str) -> None:
    if not holds:
        sys.exit(f"error: {message}")


def check_version(package: str) -> str:
    """Returns the version in the file's name, which the module and the command must have too."""
    import mindlora

    wanted = re.search(r"mindlora-([^-]+?)(?:-py3|\.tar)", os.path.basename(package)).group(1)
    check(not mindlora.__file__.startswith(f"{ROOT}/mindlora/"), f"{mindlora.__file__} is the checkout's.")
    check(mindlora.__version__ == wanted, f"mindlora.__version__ is {mindlora.__version__}, not {wanted}.")
    command = os.path.join(os.path.dirname(sys.executable), "mindlora")
    printed = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    check(printed.stdout == f"mindlora {wanted}\n", f"mindlora --version prints {printed.stdout + printed.stderr!r}.")
    return wanted


def check_library(package: str) -> None:
    from mindlora.core.operator_library import LIBRARY

    check(os.path.exists(LIBRARY), f"{LIBRARY} is missing: the package was installed without its CPU operators.")
    if package.endswith(".whl"):
        with zipfile.ZipFile(package) as wheel, open(LIBRARY, "rb") as library:
            same = wheel.read("mindlora/ops/lib/libmindlora_cpu.so") == library.read()
        check(same, f"{LIBRARY} is not the one in the wheel: it was built again.")


def check_configs() -> None:
    import mindlora

    def names(folder):
        return {path.relative_to(folder) for path in folder.glob("*/*.yaml")}

    missing = names(ROOT / "configs") - names(Path(mindlora.__file__).parent / "configs")
    check(not missing, f"the package lacks YAMLs of configs/: {', '.join(map(str, sorted(missing)))}.")


def largest_error(dtype: str) -> float:
    """Returns lora_delta's largest difference from its reference, relative to the largest output."""
    import mindspore as ms

    from mindlora.ops import LoraDelta

    random = np.random.default_rng(0)
    shapes = {"y0": (7, 33), "x": (7, 65), "a": (5, 65), "b": (33, 5)}
    tensors = [ms.Tensor(random.normal(size=shape), getattr(ms, dtype)) for shape in shapes.values()]
    rounded = [tensor.astype(ms.float32).asnumpy() for tensor in tensors]
    cell = LoraDelta()
    check(cell.path == "cpu", f"lora_delta takes the path {cell.path}, not cpu.")
    output = cell(*tensors, ms.Tensor(2.0, ms.float32)).astype(ms.float32).asnumpy()
    reference = runpy.run_path(str(ROOT / "ops" / "lora_delta" / "reference.py"))
    expected = reference["lora_delta"](*rounded, 2.0)
    return float(np.abs(output - expected).max() / np.abs(expected).max())


def main() -> None:
    package, start = sys.argv[1], time.time()
    wanted = check_version(package)
    check_library(package)
    check_configs()
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    errors = {dtype: largest_error(dtype) for dtype in TOLERANCES}
    for dtype, error in errors.items():
        check(error <= TOLERANCES[dtype], f"lora_delta in {dtype} is off by {error:.1e} of its largest output.")
    print(
        f"Python {sys.version.split()[0]}, MindSpore {version('mindspore')}, MindFormers {version('mindformers')}, "
        f"NumPy {np.__version__}: mindlora {wanted}, lora_delta on the CPU within "
        f"{', '.join(f'{error:.0e} ({dtype})' for dtype, error in errors.items())} of NumPy; "
        f"{time.time() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
