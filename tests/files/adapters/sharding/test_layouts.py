"""Layouts beyond those of MindFormers' Linear: MindSpore's own transformation is the judge of each rank's slice."""

import glob
import os

import mindspore as ms
import numpy as np
import pytest

from mindlora.core.errors import AdapterError
from mindlora.core.formats import ckpt_file, strategy_file
from mindlora.core.formats.strategy_file import Layout
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads
from mindlora.files.adapters.files import read, write
from mindlora.files.adapters.sharding.gather import gather_adapter
from mindlora.files.adapters.sharding.run_settings import RunSettings
from mindlora.files.adapters.sharding.scatter import scatter_adapter
from mindlora.files.adapters.sharding.strategy import Piece, cut, join, slice_of
from tests.support import sharded_runs
from tests.support.refusals import part, refused
from tests.support.sharded_runs import Scheme

# Device matrix, tensor map (an axis may be cut twice), step and size of optimizer parallelism.
LAYOUTS = {
    "an axis cut twice": ([2, 2, 2], [[2, 0], [-1]], 0, 0),
    "the coarser cut first": ([2, 4], [[1, 0], [-1]], 0, 0),
    "the finer cut first": ([2, 4], [[0, 1], [-1]], 0, 0),
    "both axes": ([2, 2, 2], [[1], [0]], 0, 0),
    "both axes and the optimizer": ([2, 2, 2], [[1], [0]], 4, 2),
    "three replicas' axes": ([2, 2, 2], [[-1], [0]], 2, 4),
}


def write_layout(path, name, dev_matrix, tensor_map, step, size):
    from mindspore.train import node_strategy_pb2 as messages

    strategy = messages.ParallelStrategyMap(current_stage=1)
    strategy.parallel_strategy_item.add(node_name="MatMul-1").parallel_strategys.stage = 0
    parts = strategy.parallel_layout_item.add(param_name=name).parallel_layouts
    parts.dev_matrix.add(dim=dev_matrix)
    if any(len(axes) > 1 for axes in tensor_map):
        for axes in tensor_map:
            parts.tensor_map.add(dim=axes)
    else:
        parts.tensor_map.add(dim=[axes[0] for axes in tensor_map])
    parts.param_split_shape.add()
    parts.field, parts.opt_weight_shard_step, parts.opt_weight_shard_size = 0, step, size
    path.write_bytes(strategy.SerializeToString())
    return str(path)


@pytest.mark.parametrize("case", LAYOUTS)
def test_each_rank_holds_what_mindspore_gives_it(case, tmp_path):
    path = write_layout(tmp_path / "strategy.ckpt", "w", *LAYOUTS[case])
    layout, array = strategy_file.read(path)[0]["w"], np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
    os.makedirs(tmp_path / "whole" / "rank_0")
    ms.save_checkpoint([{"name": "w", "data": ms.Tensor(array)}], str(tmp_path / "whole" / "rank_0" / "w.ckpt"))
    ms.transform_checkpoints(str(tmp_path / "whole"), str(tmp_path / "judge"), "judge", None, path)
    pieces = []
    for rank in range(8):
        (written,) = glob.glob(str(tmp_path / "judge" / f"rank_{rank}" / "*.ckpt"))
        judged, own = ms.load_checkpoint(written)["w"].asnumpy(), cut(array, layout, rank, "w")
        assert own.shape == judged.shape and own.tobytes() == judged.tobytes(), rank
        pieces.append(Piece(f"rank {rank}", slice_of(layout, rank, judged.shape, "w"), judged))
    assert join("w", pieces).tobytes() == array.tobytes()


def test_untrained_parameters_of_another_stage_do_not_count(tmp_path):
    scheme = Scheme(pp=2)
    whole = sharded_runs.tensors(scheme)
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, whole)
    stale = {sharded_runs.cell(0, "wq", "b"): np.zeros((16, 8), np.float32)}
    ranks = sharded_runs.write_ranks(tmp_path / "ranks", scheme, whole)
    sharded_runs.write_ranks(tmp_path / "others", scheme, whole, more=stale)
    name = os.path.join("rank_1", "llama_rank_1-trainable_params-1_4.ckpt")
    os.replace(tmp_path / "others" / name, os.path.join(ranks, name))
    gather_adapter(ranks, str(tmp_path / "out.ckpt"), "ckpt", strategy, RunSettings(lora_alpha=2.0))
    found = read(str(tmp_path / "out.ckpt")).tensors["model.layers.0.attention.wq", "B"]
    assert found.tobytes() == whole[sharded_runs.cell(0, "wq", "b")].tobytes()


def test_a_joined_cell_of_which_only_some_rows_are_known(tmp_path):
    pair = {("model.layers.0.attention.wq", "A"): np.ones((2, 8), np.float32)}
    pair["model.layers.0.attention.wq", "B"] = np.ones((8, 2), np.float32)
    write(Adapter(pair, {"model.layers.0.attention.wq": 2.0}), str(tmp_path / "adapter"))
    names = [sharded_runs.cell(0, "w_qkv", half) for half in "ab"]
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", Scheme(mp=2), names)
    arguments = str(tmp_path / "adapter"), str(tmp_path / "out"), strategy
    refused(AdapterError, part("w_qkv joins"), scatter_adapter, *arguments)
    report = scatter_adapter(*arguments, settings=RunSettings(heads=Heads(2, 2, 4)))
    assert report.parameters == 2


def test_experts_and_a_router_of_an_mcore_run_go_to_peft_and_back(tmp_path):
    rng, scheme = np.random.default_rng(0), Scheme(mp=2)
    experts, router = "decoder.layers.1.mlp.experts", "decoder.layers.1.mlp.router"
    shapes = {f"{router}.weight": (4, 8), f"{router}.expert_bias": (4,)}
    for leaf, rows, columns in (("weight1", 6, 8), ("weight2", 8, 3)):
        name = f"{experts}.{leaf}.mindpet_delta_lora"
        shapes |= {f"{name}_a": (4, 2, columns), f"{name}_b": (4, rows, 2)}
    whole = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    # Each rank has half of the experts; the router is on both.
    layouts = {
        name: Layout((2,), ((0,) if experts in name else (), *[()] * (len(shape) - 1)))
        for name, shape in shapes.items()
    }
    (tmp_path / "strategy").mkdir()
    strategy_file.write(str(tmp_path / "strategy" / "run.json"), 0, layouts)
    for rank in range(scheme.ranks):
        os.makedirs(tmp_path / "ranks" / f"rank_{rank}")
        own = {name: np.split(array, 2)[rank] if experts in name else array for name, array in whole.items()}
        path = str(tmp_path / "ranks" / f"rank_{rank}" / f"q_rank_{rank}-trainable_params-1_4.ckpt")
        ms.save_checkpoint([{"name": name, "data": ms.Tensor(array)} for name, array in own.items()], path)
    strategy = str(tmp_path / "strategy")
    gather_adapter(str(tmp_path / "ranks"), str(tmp_path / "peft"), "peft", strategy, RunSettings(lora_alpha=2.0))
    scatter_adapter(str(tmp_path / "peft"), str(tmp_path / "back"), strategy, "ckpt")
    for rank in range(scheme.ranks):
        paths = (glob.glob(str(tmp_path / end / f"rank_{rank}" / "*.ckpt"))[0] for end in ("back", "ranks"))
        found, expected = (ckpt_file.read(path, lambda name: True)[0] for path in paths)
        assert found.keys() == expected.keys() == whole.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
