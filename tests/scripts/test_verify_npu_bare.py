"""The steps of scripts/verify_npu.sh where there are MindSpore and MindFormers alone: no test package, no mindlora.

On a stranger's machine: a clean checkout, a Python that finds what `pip install .` brings, and a made-up CANN. The step
that calls the kernels through CANN is in tests/ops/ascendc, where the kernels are compiled.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.support.bare_python import bare_environment
from tests.support.made_up_cann import made_up_cann

NEEDS_CMAKE = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
# Makes the file that -o names, as a compiler would.
COMPILER = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" != -o ] || : > "$2"; shift; done\n'


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The variables of a Python that finds what `pip install .` brings, and no more."""
    return {**bare_environment(str(tmp_path_factory.mktemp("bare"))), "PYTHON": sys.executable}


@pytest.fixture
def checkout(tmp_path):
    """A clean one: no library, no package."""
    root = tmp_path / "checkout"
    shutil.copytree(os.path.join(ROOT, "mindlora"), root / "mindlora", ignore=shutil.ignore_patterns("lib", "*.pyc"))
    for name in ("scripts", "ops", "configs"):
        shutil.copytree(os.path.join(ROOT, name), root / name, ignore=shutil.ignore_patterns("*.pyc"))
    return root


def verified(checkout, environment, *arguments):
    """Runs the script of a checkout; returns the steps of its report by name."""
    folder = checkout.parent / "out"
    command = ["bash", str(checkout / "scripts/verify_npu.sh"), *arguments, "--output", str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return {step["name"]: step for step in json.loads((folder / "report.json").read_text())["steps"]}


def python(checkout, environment, *arguments):
    """Runs that Python in a checkout, as the steps do."""
    paths = os.pathsep.join([str(checkout), str(checkout / "scripts"), environment["PYTHONPATH"]])
    command = [environment["PYTHON"], *arguments]
    return subprocess.run(
        command, cwd=checkout, env={**environment, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("module", ["pytest", "hypothesis", "tests", "fastapi"])
def test_that_python_has_no_test_packages(bare, checkout, module):
    (checkout / "tests").mkdir()
    result = python(checkout, bare, "-c", f"import numpy, {module}")
    assert result.stderr.endswith(f"ModuleNotFoundError: No module named '{module}'\n")


@NEEDS_CMAKE
def test_doctor_library_and_build_in_a_clean_checkout(bare, checkout, tmp_path):
    made_up_cann(tmp_path, "8.5.0")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = {**bare, "ASCEND_HOME_PATH": str(tmp_path / "cann"), "MINDLORA_TEST_LOG": str(tmp_path / "log")}
    names = ("doctor", "library", "build", "doctor-after", "operators", "fine-tune", "two-devices", "bench", "msprof")
    steps = verified(checkout, {**environment, "CXX": str(compiler)}, "--only", *names)
    ran = {"doctor", "library", "build", "doctor-after"}
    assert {name: step["state"] for name, step in steps.items()} == {
        name: "holds" if name in ran else "not run" for name in names
    }
    assert "nf4_linear: composed" in steps["doctor-after"]["line"]
    for name in names[4:]:
        assert steps[name]["line"] == "no NPU: there is no /dev/davinci0"


def test_the_comparison_of_an_operator(bare, checkout, library):
    shutil.copytree(os.path.join(ROOT, "mindlora/ops/lib"), checkout / "mindlora/ops/lib")
    script = str(checkout / "scripts/verify_npu_operators.py")
    result = python(checkout, bare, script, "multi_lora_delta", "float32", "--device", "CPU", "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("20 cases, 0 failed")


def test_what_the_fine_tune_and_the_benchmark_import(bare, checkout, tmp_path):
    """The data of the quickstart, and the modules of its runs; that they train, other tests show."""
    code = f"""
import bench.ops, quickstart
quickstart.prepare_data(quickstart.Paths({str(tmp_path)!r}, True))
import mindlora.training.launch.launcher
from mindlora.training.launch import hooks
from mindlora.training.held_out import held_out_loss
from mindlora.training import report
from mindlora.cli import generate
"""
    result = python(checkout, bare, "-c", code)
    assert result.returncode == 0, result.stderr
