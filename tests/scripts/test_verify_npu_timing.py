"""The step `ways` of scripts/verify_npu.sh with a made-up msprof, and the calls that it times on a CPU."""

import argparse
import dataclasses
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# Writes what CANN's profiler leaves: 8 tokens take 5 us on the cube and 7 elsewhere; time falls with cores, of which
# there are 16.
MSPROF = """#!/bin/sh
cores=${MINDLORA_ASCEND_CORES:-16}
if [ "$cores" -gt 16 ]; then
  echo "mindlora lora_delta (ascend): MINDLORA_ASCEND_CORES is $cores: it must be 1 to 16."; exit 1
fi
folder=${1#--output=}; mkdir -p "$folder/mindstudio_profiler_output"
few=7; [ "$MINDLORA_ASCEND_KIND" = cube ] && few=5
{ echo 'OP Type,Task Duration(us),Block Dim,Input Shapes'
  echo "LoraDelta,$few,24,\\"8,4096;8,4096;16,4096;4096,16;1\\""
  echo "LoraDelta,$((160 / cores)),$cores,\\"512,4096;512,4096;64,4096;4096,64;1\\""
  echo "MatMul,1,24,\\"8,4096;16,4096\\""; } > "$folder/mindstudio_profiler_output/op_summary_1.csv"
"""


@dataclasses.dataclass
class Place:
    """As much of verify_npu_steps.Place as the step takes."""

    given: argparse.Namespace
    work: str
    environment: dict

    def python(self, *words):
        return [sys.executable, *words]

    def no_kernels(self):
        return ()

    def run(self, name, command, cannot=()):
        from verify_npu_report import Report
        from verify_npu_run import Cleaner, run

        report = Report(self.given.output, {}, [], "Ascend", Cleaner({}))
        return run(name, command, report, Cleaner({}), self.environment, 60, cannot)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(ROOT, "scripts"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/msprof").write_text(MSPROF)
    (tmp_path / "bin/msprof").chmod(0o755)
    (tmp_path / "out/logs").mkdir(parents=True)
    given = argparse.Namespace(device="Ascend", quick=False, output=str(tmp_path / "out"))
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    return Place(given, str(tmp_path), {**os.environ, "PATH": path, "MINDLORA_ASCEND_CORES": "3"})


def test_both_kinds_of_cores_and_every_number_of_them_are_timed(place):
    from verify_npu_timing import ways

    kinds, cores = ways(place)
    assert kinds.state == cores.state == "holds"
    assert kinds.line.endswith("the cube cores are faster: rank 8: none; rank 16: 8; rank 64: none")
    assert kinds.figures["microseconds"]["vector"] == {"8 tokens, rank 16": {"median": 7, "blocks": "24"}}
    # A chip of 16 cores refuses more, which is not a failure.
    assert cores.line == "512 tokens, rank 64, us by cores: the plan: 10, 2: 80, 4: 40, 8: 20, 12: 13, 16: 10"


def test_a_profiler_that_leaves_nothing_does_not_hold(place, tmp_path):
    from verify_npu_timing import ways

    (tmp_path / "bin/msprof").write_text("#!/bin/sh\n")
    outcomes = list(ways(place))
    assert {outcome.state for outcome in outcomes} == {"does not hold"}
    assert outcomes[0].line == "msprof left no op_summary with LoraDelta in it"


def test_without_an_npu_or_msprof_the_step_says_why_it_does_not_run(place):
    from verify_npu_timing import ways

    place.environment["PATH"] = os.environ["PATH"]
    (outcome,) = ways(place)
    assert outcome.state == "not run" and outcome.line.startswith("msprof is not on PATH")
    place.given.device = "CPU"
    (outcome,) = ways(place)
    assert outcome.state == "not run" and outcome.line.startswith("a CPU has no cube")


def test_the_calls_that_are_timed():
    command = [sys.executable, os.path.join(ROOT, "scripts/verify_npu_ways.py"), "kinds", "--device", "CPU"]
    result = subprocess.run([*command, "--width", "64"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 21 and lines[0].startswith("4 tokens, rank 8 ") and lines[0].endswith("with the host's time")
