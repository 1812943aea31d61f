"""The library of CPU operators, built by ``python -m mindlora.ops.build``: its path, and loading it early."""

import contextlib
import ctypes
import os
from typing import Optional

LIBRARY = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "ops", "lib", "libmindlora_cpu.so")


def file_problem(library: str) -> Optional[str]:
    """Returns the reason why MindSpore cannot open a library at this path, or None if it can."""
    if not os.path.exists(library):
        return f"{library} is missing: build it with `python -m mindlora.ops.build`"
    allowed = os.environ.get("MS_CUSTOM_AOT_WHITE_LIST")
    # MindSpore makes the same test.
    if allowed is not None and os.path.realpath(allowed) not in os.path.realpath(library):
        return f"MS_CUSTOM_AOT_WHITE_LIST ({allowed}) does not allow {library}"
    return None


def load_before_mindspore() -> None:
    """Loads the library. Called before MindSpore is imported, this makes each step of a server faster.

    Whenever MindSpore infers a shape, it asks the loader for the library, which compares names in the order in which
    libraries were loaded. Loaded after those of MindSpore and Python, it costs about 10 us per operator and step.
    A library that cannot be loaded is skipped here; mindlora.ops.backend gives the reason when an operator is chosen.
    """
    if file_problem(LIBRARY) is None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(LIBRARY)
