"""Two processes that each hold slices of an adapter: LoraCheckpoint joins them by real collectives, bit for bit."""

import json
import os

import numpy as np
import pytest

from mindlora.core.formats import strategy_file
from mindlora.core.formats.strategy_file import Layout
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.sharding.gather import gather_adapter
from mindlora.files.adapters.sharding.scatter import scatter_adapter
from tests.support import sharded_ranks
from tests.support.ranks import run_ranks
from tests.support.sharded_ranks import ALPHA, CELLS, name_of, whole_tensors

GATHERED = ("model", "stages", "optimizer", "summed", "start")
SCENARIOS = (*GATHERED, "forbidden", "unrecorded")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All scenarios, run by two ranks; returns (folder, logs)."""
    folder = tmp_path_factory.mktemp("sharded")
    whole = whole_tensors()
    pairs = {(cell, part): whole[name_of(cell, part)] for cell in CELLS for part in "AB"}
    adapter = Adapter(pairs, dict.fromkeys(CELLS, ALPHA), saved_modules={"lm_head.weight": whole["lm_head.weight"]})
    files.write(adapter, str(folder / "adapter"))
    axes = {name: sharded_ranks.axis_of("start", name) for name in whole}
    layouts = {
        name: Layout((1, 2), tuple((0,) if axis == own else () for own in range(2))) for name, axis in axes.items()
    }
    strategy_file.write(str(folder / "strategy.json"), 0, layouts)
    scatter_adapter(str(folder / "adapter"), str(folder / "scattered"), str(folder / "strategy.json"))
    return folder, run_ranks(2, folder, sharded_ranks.__file__, folder, *SCENARIOS)


def assert_whole(adapter, dtype=np.float32):
    whole = whole_tensors()
    found = {name_of(cell, part): adapter.tensors[cell, part] for cell, part in adapter.tensors}
    assert set(adapter.alphas.values()) == {ALPHA} and len(found) == 8
    for name, array in {**found, **adapter.saved_modules}.items():
        expected = whole[name] if dtype == np.float32 or name == "lm_head.weight" else from_float32(whole[name], dtype)
        assert array.dtype == expected.dtype and array.tobytes() == expected.tobytes(), name
    assert adapter.saved_modules.keys() == {"lm_head.weight"}


@pytest.mark.parametrize("scenario", GATHERED)
def test_rank_0_writes_what_the_slices_of_all_ranks_make_up(runs, scenario):
    folder, _ = runs
    assert not os.path.exists(folder / scenario / "of_rank_1")
    saved = folder / scenario / "of_rank_0"
    steps = ["step_3"] if scenario == "optimizer" else ["step_2", "step_3"]
    assert sorted(os.listdir(saved)) == ["best", *steps]
    for name in os.listdir(saved):
        assert_whole(files.read(str(saved / name)), BFLOAT16 if scenario == "summed" else np.float32)
        # There is no state to resume from, and resume_folder says so.
        assert "training_state.json" not in os.listdir(saved / name)


def test_the_last_rank_decides_which_is_best(runs):
    folder, _ = runs
    with open(folder / "stages" / "of_rank_0" / "best" / "best.json", encoding="utf-8") as file:
        # The mean of the losses 3 and 1 of steps 1 and 2, and 2 at step 3; those of rank 0 are all 5.
        assert json.load(file) == {"step": 2, "loss": 2.0}


def test_the_best_may_be_measured_between_two_saves(runs):
    folder, _ = runs
    with open(folder / "optimizer" / "of_rank_0" / "best" / "best.json", encoding="utf-8") as file:
        # To rank 0, this was the worst step.
        assert json.load(file) == {"step": 1, "held_out_loss": 0.25}


def test_slices_are_written_where_no_collective_runs_and_the_command_in_the_log_joins_them(runs):
    folder, logs = runs
    slices = folder / "forbidden" / "all" / "slices"
    assert sorted(os.listdir(slices)) == ["step_2", "step_3"]
    assert sorted(os.listdir(slices / "step_3")) == ["rank_0", "rank_1", "strategy"]
    joined = folder / "forbidden" / "all" / "step_3"
    assert (
        f"mindlora adapter gather {slices / 'step_3'} --output {joined}" in logs[0]
        and "mindlora adapter gather" not in logs[1]
    )
    gather_adapter(str(slices / "step_3"), str(joined))
    assert_whole(files.read(str(joined)))


def test_slices_without_a_recorded_layout_need_the_strategy_of_the_run(runs):
    folder, logs = runs
    slices = folder / "unrecorded" / "all" / "slices" / "step_3"
    # Only one step is to be kept.
    assert os.listdir(slices.parent) == ["step_3"]
    assert sorted(os.listdir(slices)) == ["rank_0", "rank_1"]
    assert f"mindlora adapter gather {slices} --strategy OUTPUT/strategy" in logs[0]
    gather_adapter(str(slices), str(folder / "unrecorded" / "joined"), strategy=str(folder / "strategy.json"))
    assert_whole(files.read(str(folder / "unrecorded" / "joined")))
