"""TBB's allocator, for processes that compile graphs: MindSpore needs a quarter less time than with the C library's.

pip has it for x86-64 alone. Elsewhere, and where something else is preloaded, processes keep the allocator they have.
"""

import os
import sys

_LIBRARIES = [os.path.join(sys.prefix, "lib", name) for name in ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")]
PRELOADED = ":".join(_LIBRARIES) if all(map(os.path.exists, _LIBRARIES)) else ""


def with_allocator(environment):
    """Returns an environment in which a process starts with the allocator."""
    if PRELOADED and "LD_PRELOAD" not in environment:
        return {**environment, "LD_PRELOAD": PRELOADED}
    return environment


def keep_to_this_process():
    """Lets what this process starts have the C library's allocator, as a user's programs do."""
    if PRELOADED and os.environ.get("LD_PRELOAD") == PRELOADED:
        del os.environ["LD_PRELOAD"]
