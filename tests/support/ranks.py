"""Starts a script in several processes, as msrun does, in a network of their own where the machine allows it."""

import functools
import os
import shutil
import signal
import socket
import subprocess

from tests.conftest import ROOT
from tests.support import forked


@functools.lru_cache
def own_network():
    """Returns whether this machine lets processes have a loopback device of their own."""
    words = ("unshare", "--map-root-user", "--net", "ip", "link", "set", "lo", "up")
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def run_ranks(count, folder, script, *arguments, code=0, trainer="graph"):
    """Runs ``script`` on ``count`` ranks in ``folder`` and returns their output as texts.

    ``code`` is the exit code that the first rank to fail must have, ``trainer`` what they have imported (see forked).

    About one run in a thousand crashes where MindSpore's ranks connect: its thread RECV_EVENT_LOOP (tcp_comm.cc of
    MindSpore 2.9) reads from a connection without a socket. Ranks that crash outside of Python start once more, without
    what they had put in ``folder``.
    """
    given = set(folder.iterdir())
    done, texts = _started(count, folder, script, arguments, trainer)
    if done.returncode == -signal.SIGSEGV % 256 and any(map(_crashed_outside_of_python, texts)):
        for written in set(folder.iterdir()) - given:
            if written.is_dir():
                shutil.rmtree(written)
            else:
                written.unlink()
        done, texts = _started(count, folder, script, arguments, trainer)
    logs = "".join(f"\n-- rank {rank}\n{text[-1500:]}" for rank, text in enumerate(texts))
    assert done.returncode == code, f"exit code {done.returncode}, not {code}: {done.stderr[-2000:]}{logs}"
    return texts


def _started(count, folder, script, arguments, trainer):
    """Returns the completed process of the ranks, and their output as texts."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    ranks = os.path.join(os.path.dirname(__file__), "forked_ranks.py")
    done = forked.run([ranks, count, _free_port(), own_network(), script, *arguments], folder, environment, trainer)
    return done, [(folder / "log" / f"worker_{rank}.log").read_text() for rank in range(count)]


def _crashed_outside_of_python(text):
    """Returns whether a rank's faulthandler met a crash in a thread that is not one of Python's."""
    _, crashed, threads = text.partition("Fatal Python error: Segmentation fault")
    return bool(crashed) and "Current thread" not in threads


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
