"""The example of docs/sweep.md on stories260K: mindlora sweep trains four adapters in one run and compares them."""

import json
import re
import shlex

import pytest
import yaml

from mindlora.training.report.history import read_history
from tests.support import stories260k
from tests.support.event_files import scalars_of, texts_of
from tests.support.runs import ROOT, python, succeeded
from tests.support.what_runs import shows

ADAPTERS = ("lr1e-3_r2", "lr1e-3_r8", "lr1e-2_r2", "lr1e-2_r8")


def with_whole_batches(path):
    """Changes a YAML so that each step takes its rows at once, which a tiny model does sooner than one by one."""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["runner_config"].update(batch_size=16, gradient_accumulation_steps=1)
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(library, tmp_path_factory):
    """Where the commands of the page have run."""
    folder = tmp_path_factory.mktemp("sweep")
    stories260k.write_folder(folder / "model", kept=1)
    text = (ROOT / "docs" / "sweep.md").read_text(encoding="utf-8")
    succeeded(python(["-c", re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1]], folder))
    for command in re.search(r"^```\n(mindlora data .*?)^```", text, re.M | re.S)[1].splitlines():
        words = shlex.split(command)[1:]
        if words[0] == "sweep":
            with_whole_batches(folder / "run.yaml")
        tracked = ["--report-to", "tensorboard"] if words[0] == "sweep" else []
        succeeded(python(["-m", "mindlora.cli", *words, *tracked], folder))
    return folder


@shows("several", "llama")
def test_the_best_is_found_by_its_held_out_loss(folder):
    (found,) = json.loads((folder / "output" / "comparison.json").read_text(encoding="utf-8"))
    assert found["best"] == "lr1e-2_r8" and set(found["measure"]["verdicts"]) == {*ADAPTERS} - {"lr1e-2_r8"}
    assert found["measure"]["examples"] == 24
    least = {}
    for name in ADAPTERS:
        _, losses = read_history(str(folder / "output" / name)).series("held_out_loss")
        assert losses[-1] < losses[0]
        least[name] = losses.min()
    assert min(least, key=least.get) == "lr1e-2_r8"
    values = found["measure"]["values"]
    assert values["base"]["value"] == pytest.approx(least["lr1e-2_r8"], rel=1e-6)
    assert values["lr1e-3_r2"]["value"] == pytest.approx(least["lr1e-3_r2"], rel=1e-6)
    assert values["base"]["low"] < values["base"]["value"] < values["base"]["high"]


def test_all_adapters_are_on_one_page(folder):
    page = (folder / "output" / "comparison.html").read_text(encoding="utf-8")
    assert "Which is best" in page and "lr1e-2_r8 has the smallest held-out loss" in page
    assert all(name in page for name in ADAPTERS)


def test_each_adapter_has_its_rank_in_a_folder_of_its_own(folder):
    for name in ADAPTERS:
        best = folder / "output" / name / "lora_checkpoint" / "best"
        settings = json.loads((best / "adapter_config.json").read_text(encoding="utf-8"))
        assert settings["r"] == int(name.rpartition("r")[2])


def test_each_adapter_is_a_run_of_the_tracker(folder):
    for name in ADAPTERS:
        events = folder / "output" / name / "tensorboard"
        history = read_history(str(folder / "output" / name))
        scalars = scalars_of(events)
        for field in ("loss", "learning_rate", "held_out_loss"):
            steps, values = history.series(field)
            assert [scalars[field, step] for step in steps] == pytest.approx(list(values), rel=1e-6)
        described = texts_of(events)["configuration/text_summary", 0]
        assert f"name: {name}" in described and f"lora_rank: {name.rpartition('r')[2]}" in described
