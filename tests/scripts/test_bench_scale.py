"""scripts/bench.py scale: whole runs of mindlora-run, small enough for a test, whose memory the plan has foreseen."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT

BENCH = os.path.join(ROOT, "scripts", "bench.py")
GIB = 2**30


def test_a_run_in_float_and_one_in_nf4_are_measured(mindformers, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "MINDLORA_PEERS_PYTHON"}
    environment["PYTHONPATH"] = ROOT
    command = [sys.executable, BENCH, "scale", "--quick", "--steps", "2", "--json", str(tmp_path / "figures.json")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures["runs"]) == ["quick", "quick NF4"]
    for name, sides in figures["runs"].items():
        run = sides["mindlora"]
        assert f"{name}, mindlora" in process.stdout
        assert 0 < run["load"] < run["first"] and run["step"] > 0
        assert abs(run["load"] + run["compile"] + run["step"] - run["first"]) < 1e-3
    theirs = figures["runs"]["quick"]["MindFormers"]
    assert 0 < theirs["load"] < theirs["first"] and theirs["step"] > 0
    # The second run is tiny: its peak is what the frameworks take.
    real, tiny = (sides["mindlora"] for sides in figures["runs"].values())
    assert tiny["plan"] < 0.01 * GIB < 0.2 * GIB < tiny["peak"] < 2 * GIB
    assert 0.8 < (real["peak"] - tiny["peak"]) / (real["plan"] - tiny["plan"]) < 1.5
