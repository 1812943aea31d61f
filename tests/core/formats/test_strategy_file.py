"""Strategy files are read as MindSpore reads them, and whatever is wrong with one ends in one error."""

import json
import os

import pytest

from mindlora.core.errors import AdapterFormatError, TruncatedAdapterError
from mindlora.core.formats import strategy_file
from mindlora.core.formats.strategy_file import Layout
from tests.support import sharded_runs
from tests.support.refusals import part, refused
from tests.support.sharded_runs import Scheme


def as_mindspore_reads(path):
    """Returns name -> (dev_matrix, tensor_map, step, size) as MindSpore's own reader returns them."""
    from mindspore.parallel._parallel_serialization import _extract_layout_map

    return {name: (found[0], found[1], found[4], found[5]) for name, found in _extract_layout_map(str(path)).items()}


def as_lists(layouts):
    """The same of what mindlora has read, of tensors no axis of which is cut twice."""
    return {
        name: (
            list(layout.dev_matrix),
            [axes[0] if axes else -1 for axes in layout.tensor_map],
            layout.opt_shard_step,
            layout.opt_shard_size,
        )
        for name, layout in layouts.items()
    }


@pytest.mark.parametrize("scheme", (Scheme(mp=2), Scheme(dp=2, mp=2, opt=2), Scheme(dp=4, mp=2, opt=4)), ids=str)
def test_a_protobuf_is_read_as_mindspore_reads_it(scheme, tmp_path):
    folder = sharded_runs.write_strategy(tmp_path / "strategy", scheme, sharded_runs.tensors(scheme))
    path = os.path.join(folder, "ckpt_strategy_rank_0.ckpt")
    stages = strategy_file.read(path)
    assert list(stages) == [0] and as_lists(stages[0]) == as_mindspore_reads(path)


def test_the_files_of_all_ranks_are_what_mindspore_merges(tmp_path):
    import mindspore as ms

    scheme = Scheme(dp=2, mp=2, pp=2, opt=2)
    folder = sharded_runs.write_strategy(tmp_path / "strategy", scheme, sharded_runs.tensors(scheme))
    ms.merge_pipeline_strategys(folder, str(tmp_path / "merged.ckpt"))
    stages = strategy_file.read_all(folder)
    assert sorted(stages) == [0, 1] and stages == strategy_file.read(str(tmp_path / "merged.ckpt"))


def json_strategy(stage=0, **changes):
    layout = {
        "dev_matrix": [2, 2],
        "tensor_map": [0, -1],
        "param_split_shape": [],
        "indices_offset": [],
        "field": 0,
        "opt_weight_shard_step": 2,
        "opt_weight_shard_size": 2,
        **changes,
    }
    return {
        "current_stage": 1,
        "parallel_strategy_item": {"MatMul-1": {"stage": stage, "parallel_strategy": [[2, 2]]}},
        "parallel_layout_item": {"w": layout},
    }


def write_json(path, content):
    path.write_text(json.dumps(content))
    return str(path)


def test_json_is_read_as_mindspore_reads_it(tmp_path):
    import mindspore as ms

    path = write_json(tmp_path / "stage_1.json", json_strategy(stage=1))
    assert strategy_file.read(path) == {1: {"w": Layout((2, 2), ((0,), ()), 2, 2)}}
    assert as_mindspore_reads(path) == as_lists(strategy_file.read(path)[1])
    write_json(tmp_path / "stage_0.json", json_strategy(stage=0))
    ms.merge_pipeline_strategys(str(tmp_path), str(tmp_path / "merged.json"))
    assert strategy_file.read(str(tmp_path / "merged.json")) == strategy_file.read_all(str(tmp_path))


def test_an_axis_that_two_axes_of_the_devices_cut(tmp_path):
    from mindspore.train import node_strategy_pb2 as messages

    strategy = messages.ParallelStrategyMap(current_stage=1)
    parts = strategy.parallel_layout_item.add(param_name="w").parallel_layouts
    parts.dev_matrix.add(dim=[2, 2, 2])
    parts.tensor_map.add(dim=[2, 0])
    parts.tensor_map.add(dim=[-1])
    parts.param_split_shape.add()
    parts.field = parts.opt_weight_shard_step = parts.opt_weight_shard_size = 0
    path = tmp_path / "nested.ckpt"
    path.write_bytes(strategy.SerializeToString())
    assert strategy_file.read(str(path)) == {0: {"w": Layout((2, 2, 2), ((2, 0), ()))}}
    assert as_mindspore_reads(path)["w"][1] == [[2, 0], [-1]]
    parts.field = 3
    path.write_bytes(strategy.SerializeToString())
    assert strategy_file.read(str(path))[0]["w"].uneven


def test_a_damaged_file_ends_in_one_error(tmp_path):
    scheme = Scheme(mp=2)
    folder = sharded_runs.write_strategy(tmp_path / "strategy", scheme, sharded_runs.tensors(scheme))
    with open(os.path.join(folder, "ckpt_strategy_rank_0.ckpt"), "rb") as file:
        content = file.read()
    path = tmp_path / "damaged.ckpt"
    whole = strategy_file.read(os.path.join(folder, "ckpt_strategy_rank_0.ckpt"))
    for size in [*range(0, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:size])
        try:
            found = strategy_file.read(str(path))
        except (TruncatedAdapterError, AdapterFormatError):
            continue
        # Cut between two parameters; whoever needs the others will miss them.
        assert len(found[0]) < len(whole[0]) and found[0].items() <= whole[0].items()
    path.write_bytes(b"")
    refused(TruncatedAdapterError, part("is empty"), strategy_file.read, str(path))


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not JSON"),
        ("{}", "holds no layout"),
        (json.dumps({"parallel_layout_item": {"w": {"dev_matrix": [2]}}}), "is not a strategy file"),
        (json.dumps({"parallel_layout_item": {"w": 3}}), "is not a strategy file"),
        (json.dumps(json_strategy(tensor_map="ab")), "is not a strategy file"),
    ],
)
def test_json_that_is_no_strategy_is_refused(content, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(content)
    refused(AdapterFormatError, part(message), strategy_file.read, str(path))


def test_files_that_contradict_each_other_are_refused(tmp_path):
    write_json(tmp_path / "a.json", json_strategy())
    write_json(tmp_path / "b.json", json_strategy(opt_weight_shard_size=0))
    refused(AdapterFormatError, part("pipeline stage 0 and differ"), strategy_file.read_all, str(tmp_path))
    os.mkdir(tmp_path / "empty")
    refused(AdapterFormatError, part("holds no strategy file"), strategy_file.read_all, str(tmp_path / "empty"))
    refused(AdapterFormatError, part("does not exist"), strategy_file.read_all, str(tmp_path / "nowhere"))
    twice = {
        "parallel_layout_item": {f"{prefix}w": json_strategy()["parallel_layout_item"]["w"] for prefix in ("", "0-")}
    }
    refused(AdapterFormatError, part("twice"), strategy_file.read, write_json(tmp_path / "c.json", twice))
