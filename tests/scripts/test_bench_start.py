"""scripts/bench.py start: each command is started twice, over its own folder of graphs."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT

BENCH = os.path.join(ROOT, "scripts", "bench.py")
NAMES = ["generate, first start", "generate, second start", "mindlora-run, first start", "mindlora-run, second start"]


def test_every_command_is_started_twice(library, mindformers, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "MINDLORA_PEERS_PYTHON"}
    environment["PYTHONPATH"] = ROOT
    command = [sys.executable, BENCH, "start", "--quick", "--json", str(tmp_path / "figures.json")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    starts = figures["starts"]
    assert list(starts) == NAMES and "instruction_set" in figures["machine"]
    assert all(f"\n{name}" in process.stdout for name in NAMES)
    assert all(start["cpu"] > 0 and start["wall"] > 0 for start in starts.values())
    # What is not compiled again.
    assert starts[NAMES[3]]["cpu"] < starts[NAMES[2]]["cpu"]
    # The frameworks take most of it.
    assert starts[NAMES[0]]["peak"] < 2**30
