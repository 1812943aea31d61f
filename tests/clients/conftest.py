"""Fixtures: the process of the clients, and the server that they ask: `mindlora serve` on a random model.

Without an environment that has the clients, the tests are skipped; on CI they fail instead, so that no run passes
unchecked.
"""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.peers.peer import Peer, python_of
from tests.support.served_llama import serving, write_llama

SCRIPT = os.path.join(os.path.dirname(__file__), "..", "support", "clients", "clients_side.py")


@pytest.fixture(scope="session")
def clients(tmp_path_factory):
    """The clients' process; its methods are the verbs of clients_side.py."""
    python = python_of("MINDLORA_CLIENTS_PYTHON", "the clients", "tests/clients")
    process = Peer(python, tmp_path_factory.mktemp("clients") / "stderr.txt", SCRIPT)
    yield process
    process.close()


@pytest.fixture(scope="module")
def server(clients, tmp_path_factory):
    """The server; its models are `base` and the adapter `first`."""
    folder = write_llama(str(tmp_path_factory.mktemp("served")), 2048)
    with serving(folder, "--model-name", "base", "--max-running", "4", run=run_alone) as found:
        yield found


def run_alone(program, folder):
    """Does what run_here of served_llama does, in a process for which no other one waits, and which no clock ends."""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stderr
