"""Memory that this process has freed, which the C library keeps."""

import ctypes


def give_back_freed_memory() -> None:
    """Gives freed memory back to the system where the C library can (glibc's malloc_trim), in whole pages.

    glibc keeps small pieces for later ones of their size. A compiler of graphs frees very many, and the large tensors
    of the steps that follow get none of them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
