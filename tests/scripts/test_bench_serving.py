"""scripts/bench.py serving: its tables, on a Llama so small that the figures say nothing."""

import json
import math
import os
import sys

import mindspore as ms
import pytest

from mindlora.serving.adapter_registry import AdapterRegistry
from tests.conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, "scripts"))
from bench import serving_adapters, serving_decode, serving_engine  # noqa: E402
from bench import serving_model as model  # noqa: E402

TINY = model.Size(64, 96, 2, 1, 256, (16,), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("RUN_MODE", "predict")
    patch.chdir(tmp_path_factory.mktemp("bench"))
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    yield model.Files(os.getcwd())
    patch.undo()


@pytest.fixture(scope="module")
def engine(folder):
    """An engine that has not been started, with the adapters of all tables."""
    ranks = {**dict.fromkeys(serving_adapters.NAMES, 16), **serving_decode.RANKS}
    registry = AdapterRegistry(None, folder.adapters(TINY, ranks))
    made = folder.engine(TINY, registry, slots=len(serving_decode.RANKS), max_rank=64)
    made.runner.warm_up()
    yield made
    if made.alive:
        made.stop()


def check(table, batch=None):
    """Asserts that a table holds numbers alone, goes into JSON, and shows each of its figures."""
    shown = serving_engine.text(json.loads(json.dumps(table)))
    for side, figures in table["seconds"].items():
        assert side in shown and figures["count"] >= 1
        assert all(map(math.isfinite, figures.values())) and figures["min"] > 0
        if batch:
            assert table["tokens_per_second"][side] == pytest.approx(batch / figures["median"])
    for name, figure in table["ratios"].items():
        assert name in shown and figure["goal"] in shown and math.isfinite(figure["value"])


def test_a_figure_is_the_median_over_the_rounds_of_what_two_sides_took_in_one():
    taken = {"one": iter((1.0, 1.0, 9.0, 4.0)), "other": iter((5.0, 2.0, 3.0, 2.0))}
    sides = {name: lambda times=times: next(times) for name, times in taken.items()}
    ratios = {
        "seconds": serving_engine.Ratio("one", "other"),
        "tokens": serving_engine.Ratio("one", "other", kind="tokens"),
        "ms": serving_engine.Ratio("one", "other", "goal: at most 50", kind="difference"),
    }
    table = serving_engine.compare("title", sides, 3, 8, ratios, "remark", warm_up=1)
    assert {name: figure["value"] for name, figure in table["ratios"].items()} == {
        "seconds": 2.0,
        "tokens": 0.5,
        "ms": 2000.0,
    }
    assert table["tokens_per_second"] == {"one": 2.0, "other": 4.0}
    assert table["seconds"]["one"]["median"] == 4.0
    assert "goal: at most 50" in serving_engine.text(table)


@pytest.mark.parametrize("shape, fewest, most", [("identical", 1, 1), ("distinct", 8, 8), ("uniform", 2, 8)])
def test_popularity_names_as_many_adapters_as_its_shape_says(shape, fewest, most):
    names = model.popularity(shape, 8, [f"a{number}" for number in range(8)])
    assert len(names) == 8 and fewest <= len(set(names)) <= most


def test_zipf_names_the_nth_adapter_with_weight_one_over_n():
    names = model.popularity("zipf", 20000, list("abcd"))
    counts = [names.count(name) / names.count("a") for name in "abcd"]
    assert counts == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=0.06)


def test_the_parts_that_share_an_engine_give_tables(engine):
    steps = list(serving_decode.steps(engine, None, TINY, "float32", TINY.contexts[0]))
    assert len(steps) == 3
    for table, batch in zip(steps, (1, 8, 8)):
        check(table, batch)
    engine.start()
    for table in serving_decode.rates(engine, TINY):
        check(table)
    lists = serving_adapters.model_lists({"few": engine, "many": engine}, 4)
    check(lists)
    # The times in them differ, and so may the bytes of what is compressed.
    assert lists["more"]["few"]["bytes"] == pytest.approx(lists["more"]["many"]["bytes"], rel=0.02)
    load = serving_adapters.by_popularity(engine, serving_adapters.Load(TINY), 1)
    check(load)
    # The first adapters are in slots already; of 32 distinct ones, half are not.
    assert load["more"]["identical"]["slot hit rate"] == 1 > load["more"]["distinct"]["slot hit rate"] > 0


def test_an_adapter_that_is_said_to_be_on_disk_is_read_each_time(folder):
    table = serving_adapters.from_disk(folder, TINY)
    check(table, 1)
    assert set(table["seconds"]) == {"resident", "from disk"}
