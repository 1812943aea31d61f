"""Ctrl-C: what the program wants happens, whatever handlers a library installs."""

import subprocess
import sys

from tests.support.runs import environment

BEGIN = """
import os, signal, time
from mindlora.core.interrupts import Interrupts, entered

received = []

def receive():
    received.append(1)

def press(seconds=20, until=lambda: False):
    os.kill(os.getpid(), signal.SIGINT)
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.01)

signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def run(program):
    """Runs a program; returns its exit code, what it printed, and its standard error."""
    words = [sys.executable, "-c", BEGIN + program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment())
    return done.returncode, done.stdout.split(), done.stderr


def test_it_ends_the_process_with_one_line_whatever_handler_a_library_installs():
    code, printed, error = run(
        "with Interrupts('prog', lambda: print('cleaned', flush=True)):\n"
        "    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))\n"
        "    press()\n"
        "    print('still here')\n"
    )
    assert (code, printed, error) == (130, ["cleaned"], "\nprog: interrupted\n")


def test_a_clean_up_that_fails_does_not_keep_the_process():
    code, _, error = run("with Interrupts(clean_up=lambda: 1 / 0):\n    press()\n")
    assert (code, error) == (130, "\nmindlora: interrupted\n")


def test_it_is_handed_over_and_taken_back():
    code, printed, error = run(
        "with Interrupts() as interrupts:\n"
        "    assert entered() is interrupts\n"
        "    interrupts.hand_to(receive)\n"
        "    press(until=lambda: len(received) == 1); press(until=lambda: len(received) == 2)\n"
        "    print(*received, flush=True)\n"
        "    interrupts.hand_to(None)\n"
        "    press()\n"
        "    print('still here')\n"
    )
    assert (code, printed, error) == (130, ["1", "1"], "\nmindlora: interrupted\n")


def test_within_raising_it_interrupts_the_main_thread_once():
    code, printed, error = run(
        "with Interrupts() as interrupts:\n"
        "    interrupts.hand_to(receive)\n"
        "    for times in (1, 2):\n"
        "        try:\n"
        "            with interrupts.raising():\n"
        "                press(); print('still here')\n"
        "        except KeyboardInterrupt:\n"
        "            print('raised', flush=True)\n"
        "        press(until=lambda: len(received) == times)\n"
        "        print(len(received))\n"
    )
    assert (code, printed, error) == (0, ["raised", "1", "raised", "2"], "")


def test_afterwards_signals_are_as_before():
    code, printed, error = run(
        "before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]\n"
        "for _ in range(3):\n"
        "    with Interrupts() as interrupts, interrupts.raising():\n"
        "        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]\n"
        "assert entered() is None\n"
        "try:\n"
        "    press()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    assert (code, printed, error) == (0, ["interrupted"], "")


def test_where_it_is_ignored_it_stays_so():
    code, printed, error = run(
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "with Interrupts() as interrupts, interrupts.raising():\n"
        "    assert entered() is None\n"
        "    press(seconds=0.2)\n"
        "    print('still here')\n"
    )
    assert (code, printed, error) == (0, ["still", "here"], "")
