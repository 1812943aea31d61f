"""scripts/what_runs.py: the tables are what tests showed, and a table that says more is found."""

import importlib.util
import json

import pytest

from tests.conftest import ROOT
from tests.support.what_runs import shows

SHOWN = [
    ["lora", "qwen3", "graph", "cpu", "test_a", False],
    ["lora", "qwen3", "graph", "cpu", "test_a", True],
    ["lora", "qwen3", "graph", "ascend", "test_b", False],
    ["dora", "llama", "pynative", "cpu", "test_c", True],
]


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("what_runs", f"{ROOT}/scripts/what_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def found(script, tmp_path):
    path = tmp_path / "shown.jsonl"
    path.write_text("\n".join(map(json.dumps, SHOWN)), encoding="utf-8")
    return script.shown(path)


def test_a_cell_says_where_a_test_passed_and_where_one_is_there(script, found):
    text = script.tables(found)
    assert "| LoRA: training, adapter files |  | CPU, NPU° |  |  |" in text
    graph, pynative = text.split("## The PyNative Trainer")
    assert "| DoRA | CPU |" in pynative and "DoRA" not in graph
    assert script.unshown(text, found) == []


def test_what_no_test_showed_is_named(script, found):
    text = script.tables(found)
    del found["lora", "qwen3", "graph", "ascend"]
    found["dora", "llama", "pynative", "cpu"] = False
    assert script.unshown(text, found) == [
        "Graph mode / LoRA: training, adapter files / Qwen3: NPU°",
        "The PyNative Trainer / DoRA / Llama: CPU",
    ]
    found["lora", "qwen3", "graph", "ascend"] = True
    assert script.unshown(text, found) == ["The PyNative Trainer / DoRA / Llama: CPU"]


def test_a_mark_names_what_the_page_knows():
    with pytest.raises(AssertionError):
        shows("lora", "a model that is not there")
