"""Builds the library of the CPU operators: `python -m mindlora.ops.build`; setup.py does the same.

Nothing outside the standard library is imported here, so that setup.py can run it before anything is installed.
"""

import glob
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import List

_HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.path.join(_HERE, "lib", "libmindlora_cpu.so")
# Beside the package in a checkout; an installed package holds only the built library.
SOURCES = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "ops")
FLAGS = (
    "-O3",
    "-shared",
    "-fPIC",
    "-std=c++17",
    "-D_GLIBCXX_USE_CXX11_ABI=0",
    "-fopenmp",
    "-Wno-psabi",
    f"-I{SOURCES}",
)


def sources() -> List[str]:
    """Returns the paths of the .cc files; an empty list outside a checkout."""
    return sorted(
        glob.glob(os.path.join(SOURCES, "cpu_common", "*.cc")) + glob.glob(os.path.join(SOURCES, "*", "cpu", "*.cc"))
    )


def is_current(library: str = LIBRARY) -> bool:
    """Returns whether the library exists and no source or header is newer."""
    if not os.path.exists(library):
        return False
    headers = [
        path
        for folder in ("cpu_common", "*/cpu", "ascendc_common", "lora_delta/ascendc/*")
        for path in glob.glob(os.path.join(SOURCES, folder, "*.h"))
    ]
    return os.path.getmtime(library) >= max(map(os.path.getmtime, [*sources(), *headers, __file__]))


def build(library: str = LIBRARY) -> str:
    """Compiles the sources of the checkout into one shared library, replaces the old one in one step, returns its path.

    Raises RuntimeError if there are no sources or no compiler, or the compiler fails; the message then quotes it.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if platform.system() != "Linux":
        raise RuntimeError(f"The CPU operators can only be built on Linux; this is {platform.system()}.")
    if not sources():
        raise RuntimeError(f"The sources of the CPU operators are not in {SOURCES}: build in a checkout of mindlora.")
    if compiler is None:
        raise RuntimeError("No C++ compiler was found (g++, or what CXX names): install one.")
    os.makedirs(os.path.dirname(library), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(library)) as folder:
        unfinished = os.path.join(folder, "library.so")
        objects = [os.path.join(folder, f"{number}.o") for number in range(len(sources()))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source, to: _run(compiler, "-c", source, "-o", to), sources(), objects))
        _run(compiler, *objects, "-o", unfinished)
        os.replace(unfinished, library)
    return library


def _run(compiler, *arguments):
    result = subprocess.run([compiler, *FLAGS, *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{compiler} failed on the CPU operators:\n{result.stderr[-4000:]}")


def main() -> None:
    try:
        print(f"built {build()}")
    except RuntimeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
