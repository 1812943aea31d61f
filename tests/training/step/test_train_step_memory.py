"""Freed memory goes back to the system, where glibc would keep it."""

import ctypes
import os

import pytest

from mindlora.training.step import train_step


def resident():
    """Returns the bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_small_pieces_that_were_freed_leave_the_process():
    pieces = [bytearray(3000) for _ in range(20_000)]
    # The last one keeps glibc from giving back by itself what is below it.
    del pieces[:-1]
    before = resident()
    train_step.give_back_freed_memory()
    assert resident() < before - 30 * 10**6


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    train_step.give_back_freed_memory()
