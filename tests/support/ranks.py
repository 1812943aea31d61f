"""Starts a script in several processes with msrun, in a network of their own where the machine allows it."""

import functools
import os
import socket
import subprocess
import sys

from tests.conftest import ROOT


@functools.lru_cache
def own_network():
    """Returns the words before a command that give it a loopback device of its own; none where that is not allowed."""
    words = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    try:
        allowed = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    return words if allowed else ()


def run_ranks(count, folder, script, *arguments):
    """Runs ``script`` on ``count`` ranks in ``folder``, each with one thread, and returns their output as texts."""
    environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment["PATH"]])
    options = [f"--worker_num={count}", f"--local_worker_num={count}", "--master_addr=127.0.0.1", "--join=True"]
    options += [f"--master_port={_free_port()}", "--log_dir=log"]
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run", *options, script, *arguments]
    done = subprocess.run(
        [*own_network(), *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    texts = [(folder / "log" / f"worker_{rank}.log").read_text() for rank in range(count)]
    assert done.returncode == 0, done.stderr[-2000:] + texts[0][-3000:]
    return texts


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
