"""Ctrl-C: what the program wants happens, whatever handlers a library installs."""

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BEGIN = """
import os, signal, time
from mindlora.common.interrupts import Interrupts, entered

def press():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)

signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def run(program):
    """Runs a program; returns its exit code, what it printed, and its standard error."""
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60, env=environment
    )
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
        "    interrupts.hand_to(lambda: print('received', flush=True))\n"
        "    press(); press()\n"
        "    interrupts.hand_to(None)\n"
        "    press()\n"
        "    print('still here')\n"
    )
    assert (code, printed, error) == (130, ["received", "received"], "\nmindlora: interrupted\n")


def test_within_raising_it_interrupts_the_main_thread_once():
    code, printed, error = run(
        "with Interrupts() as interrupts:\n"
        "    interrupts.hand_to(lambda: print('received', flush=True))\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            with interrupts.raising():\n"
        "                press(); print('still here')\n"
        "        except KeyboardInterrupt:\n"
        "            print('raised', flush=True)\n"
        "        press()\n"
    )
    assert (code, printed, error) == (0, ["raised", "received"] * 2, "")


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
        "    press()\n"
        "    print('still here')\n"
    )
    assert (code, printed, error) == (0, ["still", "here"], "")
