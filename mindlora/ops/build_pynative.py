"""Builds the C++ module through which PyNative calls the Ascend C kernels: `python -m mindlora.ops.build_pynative`.

scripts/build_ascend.sh builds it too. It needs a MindSpore for Ascend, CANN, ninja and a compiler, but no NPU.
"""

import os
import sys
import tempfile

from mindspore.ops import CustomOpBuilder

from mindlora.ops.ascend import PYNATIVE_MODULE, PYNATIVE_PATH, age_problem
from mindlora.ops.build import SOURCES

SOURCE = os.path.join(SOURCES, "ascendc_common", "pynative.cc")
# MindSpore's own flags name the plugin before the objects that need it, and many linkers drop such a library.
_FLAGS = "-Wl,--no-as-needed -l:libmindspore_ascend.so.2"


def build() -> str:
    """Compiles the module for the MindSpore of this Python, replaces an older one in one step, and returns its path.

    Raises:
        RuntimeError: MindSpore is too old, the source or ninja is missing, or the compiler fails.
        ValueError: ASCEND_OPP_PATH is not set.
    """
    too_old = age_problem()
    if too_old:
        raise RuntimeError(f"{too_old}. In PyNative ops.Custom calls the kernels, as in graph mode.")
    if not os.path.exists(SOURCE):
        raise RuntimeError(f"{SOURCE} is missing: build in a checkout of mindlora.")
    os.makedirs(os.path.dirname(PYNATIVE_PATH), exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(PYNATIVE_PATH)) as folder:
        builder = CustomOpBuilder(PYNATIVE_MODULE, SOURCE, backend="Ascend", ldflags=_FLAGS, build_dir=folder)
        os.replace(builder.build(), PYNATIVE_PATH)
    return PYNATIVE_PATH


def main() -> None:
    """Builds the module, or prints why it cannot be built."""
    try:
        print(f"built {build()}")
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
