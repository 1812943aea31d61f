"""The library of the operators for CPUs, which ``python -m mindlora.ops.build`` builds: where it is, loaded early."""

import contextlib
import ctypes
import os
from typing import Optional

LIBRARY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "ops", "lib", "libmindlora_cpu.so")


def file_problem(library: str) -> Optional[str]:
    """Returns why MindSpore could not open a library, by its path alone; None if it could."""
    if not os.path.exists(library):
        return f"{library} is missing: build it with `python -m mindlora.ops.build`"
    allowed = os.environ.get("MS_CUSTOM_AOT_WHITE_LIST")
    # The same test as in MindSpore.
    if allowed is not None and os.path.realpath(allowed) not in os.path.realpath(library):
        return f"MS_CUSTOM_AOT_WHITE_LIST ({allowed}) does not allow {library}"
    return None


def load_before_mindspore() -> None:
    """Loads the library; called before MindSpore is imported, it makes each step of a server faster.

    Whenever MindSpore infers a shape, it asks the loader for the library, which compares names in the order in which
    libraries were loaded. Behind those of MindSpore and Python that takes about 10 us, for each operator of each step.
    A library that cannot be loaded is left alone: whoever picks an operator is told why (mindlora.ops.backend).
    """
    if file_problem(LIBRARY) is None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(LIBRARY)
