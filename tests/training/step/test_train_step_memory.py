"""Freed memory goes back to the system, where glibc would keep it."""

import ctypes
import subprocess
import sys

import pytest

from mindlora.training.step import train_step
from tests.support import runs

# Prints the bytes in memory before and after. The last piece keeps glibc from giving back by itself what is below it.
FREES = """
import os
from mindlora.training.step import train_step

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pieces = [bytearray(3000) for _ in range(20_000)]
del pieces[:-1]
before = resident()
train_step.give_back_freed_memory()
print(before, resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_small_pieces_that_were_freed_leave_the_process():
    # In a process of its own, since this one may have another allocator than glibc's.
    run = subprocess.run([sys.executable, "-c", FREES], env=runs.environment(), capture_output=True, text=True)
    before, after = map(int, runs.succeeded(run).split()[-2:])
    assert after < before - 30 * 10**6


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    train_step.give_back_freed_memory()
