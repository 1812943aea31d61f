"""scripts/tiny_qwen3.sh: LoRA on a tiny Qwen3 with each Trainer of the installed MindFormers, here for fewer steps."""

import pathlib
import re
import runpy

from mindlora.files.adapters import files as adapter_files
from tests.conftest import ROOT
from tests.support import pynative_runs

SCRIPT = pathlib.Path(ROOT) / "scripts" / "tiny_qwen3.py"


def test_each_trainer_learns_and_saves_an_adapter(tmp_path, monkeypatch, capsys):
    # The script goes to the checkout.
    monkeypatch.chdir(ROOT)
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["main"].__globals__, "EPOCHS", 1)
    monkeypatch.setattr("sys.argv", [str(SCRIPT), "--output", str(tmp_path)])
    script["main"]()
    printed = capsys.readouterr().out
    losses = re.findall(r": loss ([\d.]+) at step 1, ([\d.]+) at step 16$", printed, re.MULTILINE)
    adapters = re.findall(r"^  adapter  (.+)$", printed, re.MULTILINE)
    assert len(losses) == len(adapters) == (2 if pynative_runs.has_pynative_trainer() else 1)
    assert all(float(last) < float(first) for first, last in losses)
    assert all(adapter_files.read(folder).paths for folder in adapters)
