"""Every program in examples/ runs in the way its first lines describe, and prints what it claims to show."""

import glob
import os
import re

import pytest

from tests.conftest import ROOT
from tests.support import forked

PROGRAMS = {os.path.basename(path)[: -len(".py")]: path for path in glob.glob(os.path.join(ROOT, "examples", "*.py"))}


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs one example in a process and an empty folder of its own, and returns its output."""

    def run(name):
        folder = tmp_path / "empty"
        folder.mkdir()
        environment = {**os.environ, "PYTHONPATH": ROOT, "LOG_MF_PATH": str(tmp_path / "log")}
        result = forked.run([PROGRAMS[name]], folder, environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def number_after(label, output):
    """Returns the number that follows ``label:`` in what a program printed."""
    return float(re.search(rf"^{re.escape(label)}: (\S+)$", output, re.M).group(1))


def test_lora_on_a_plain_network(run):
    output = run("lora_on_a_plain_network")
    assert "trainable params: 336 || all params: 1,012" in output
    first, last = map(float, re.search(r"loss: (\S+) at the first step, (\S+) at the last", output).groups())
    assert last < first / 2
    assert "saved: adapter_config.json, adapter_model.safetensors" in output
    assert number_after("largest difference of the outputs after loading", output) < 1e-6


def test_peft_adapter_on_mindformers_llama(run):
    output = run("peft_adapter_on_mindformers_llama")
    cells = [f"model.layers.{layer}.attention.{leaf}" for layer in range(2) for leaf in ("wq", "wv")]
    assert f"cells with an adapter: {', '.join(cells)}" in output
    assert number_after("largest change of the logits", output) > 0.01


def test_merge_and_export(run):
    output = run("merge_and_export")
    assert number_after("largest difference from NumPy", output) < 1e-5
    assert "model.layers.0.attention.wq.weight" in output
    assert re.search("^equal +yes$", output, re.M)


def test_many_adapters_in_one_batch(run):
    output = run("many_adapters_in_one_batch")
    assert "ranks in the pool: [2, 8, 4, 0]" in output
    assert number_after("largest difference from NumPy, relative", output) < 1e-6
    assert "rows without an adapter are unchanged: True" in output


def test_every_example_has_a_test_and_a_row_in_the_readme():
    with open(os.path.join(ROOT, "examples", "README.md"), encoding="utf-8") as file:
        readme = file.read()
    assert PROGRAMS.keys() == {name[len("test_") :] for name in globals() if name[len("test_") :] in PROGRAMS}
    assert all(f"({name}.py)" in readme for name in PROGRAMS)
