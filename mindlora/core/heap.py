"""Returns memory that this process has freed, and that the C library keeps, to the system."""

import ctypes


def give_back_freed_memory() -> None:
    """Returns freed memory to the system, in whole pages, if the C library can (glibc's malloc_trim).

    glibc keeps small pieces for later ones of their size. A graph compiler frees very many, and the large tensors
    of later steps cannot use them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
