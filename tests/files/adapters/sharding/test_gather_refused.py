"""Whatever does not belong together ends in one clear error, and nothing is written."""

import os
import shutil

import mindspore as ms
import numpy as np
import pytest

from mindlora.core.errors import (
    AdapterError,
    AdapterFormatError,
    ConfigError,
    LoraError,
    MissingTensorsError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
    TruncatedAdapterError,
    UnexpectedTensorsError,
)
from mindlora.core.formats.strategy_file import Layout
from mindlora.files.adapters.convert import Heads
from mindlora.files.adapters.sharding import strategy
from mindlora.files.adapters.sharding.gather import gather_adapter
from mindlora.files.adapters.sharding.run_settings import RunSettings, heads_of, pet_config_of
from mindlora.files.adapters.sharding.strategy import Piece, Slice, Strategy
from mindlora.models.lora_config import LoraConfig
from tests.support import sharded_runs
from tests.support.refusals import part, refused
from tests.support.sharded_runs import Scheme

SCHEME = Scheme(dp=2, mp=2)


@pytest.fixture
def run(tmp_path):
    """Returns (ranks, strategy, refuse): refuse gathers and asserts the error, and that nothing was written."""
    ranks, strategy, _ = sharded_runs.write_run(tmp_path, SCHEME)

    def refuse(kind, message, strategy=strategy, settings=None, **keys):
        settings = settings or RunSettings(lora_alpha=2.0)
        before = sorted(os.listdir(tmp_path))
        refused(kind, part(message), gather_adapter, ranks, str(tmp_path / "out"), "peft", strategy, settings, **keys)
        assert sorted(os.listdir(tmp_path)) == before

    return ranks, strategy, refuse


def file_of(ranks, rank, at="1_4"):
    return os.path.join(ranks, f"rank_{rank}", f"llama_rank_{rank}-trainable_params-{at}.ckpt")


def another(tmp_path, scheme, names=None, name="other"):
    return sharded_runs.write_strategy(tmp_path / name, scheme, names or sharded_runs.tensors(scheme))


def test_a_missing_rank(run):
    ranks, _, refuse = run
    shutil.rmtree(os.path.join(ranks, "rank_2"))
    refuse(MissingTensorsError, "lacks rank 2: the strategy")


def test_two_steps(run):
    ranks, _, refuse = run
    os.rename(file_of(ranks, 3), file_of(ranks, 3, "1_5"))
    refuse(AdapterFormatError, "the newest of rank 0 is 1_4, that of rank 3 is 1_5")
    refuse(MissingTensorsError, "holds no checkpoint of step 1_4; the steps in it are: 1_5", at="1_4")


def test_two_runs_whose_files_have_the_same_names(tmp_path):
    ranks, strategy, _ = sharded_runs.write_run(tmp_path, Scheme(mp=2), kind="", steps=[4, 8])
    message = "was saved after 4 steps and"
    refused(AdapterFormatError, part(message), gather_adapter, ranks, str(tmp_path / "out"), "peft", strategy)


def test_two_files_of_one_step(run):
    ranks, _, refuse = run
    shutil.copy(file_of(ranks, 1), os.path.join(ranks, "rank_1", "other_rank_1-trainable_params-1_4.ckpt"))
    refuse(AdapterFormatError, "holds 2 checkpoints of one step")


def test_the_file_of_another_rank_does_not_count(run):
    ranks, _, refuse = run
    os.rename(file_of(ranks, 1), os.path.join(ranks, "rank_1", "llama_rank_0-trainable_params-1_4.ckpt"))
    refuse(MissingTensorsError, "named PREFIX_rank_1-EPOCH_STEP.ckpt")


def test_a_folder_without_ranks(run, tmp_path):
    _, strategy, _ = run
    for folder, message in ((tmp_path, "holds no folder rank_0"), (tmp_path / "none", "is not a folder")):
        refused(AdapterFormatError, part(message), gather_adapter, str(folder), str(tmp_path / "out"), "peft", strategy)


def test_the_strategy_of_another_run(run, tmp_path):
    refuse = run[2]
    # Another number of ranks, other cells, without one of these cells, and with the axes the other way round.
    refuse(AdapterFormatError, "has folders of 4 ranks, but the strategy", another(tmp_path, Scheme(mp=2)))
    refuse(MissingTensorsError, "lacks rank 4, 5, 6, 7", another(tmp_path, Scheme(mp=8), name="eight"))
    names = list(sharded_runs.tensors(SCHEME))
    refuse(UnexpectedTensorsError, "knows nothing", another(tmp_path, SCHEME, names[:4], "less"))
    more = [*names, sharded_runs.cell(7, "wq", "a")]
    refuse(MissingTensorsError, "lacks model.layers.7.attention.wq", another(tmp_path, SCHEME, more, "more"))
    refuse(AdapterFormatError, "differs between", another(tmp_path, Scheme(dp=4), name="data"))
    refuse(ShapeMismatchError, "no rank r in common", another(tmp_path, Scheme(dp=2, mp=2, opt=2), name="opt"))
    shutil.rmtree(tmp_path / "strategy")
    refuse(AdapterFormatError, "has no folder strategy", None)


def test_a_pipeline_stage_without_a_strategy(tmp_path):
    ranks, strategy, _ = sharded_runs.write_run(tmp_path, Scheme(pp=2))
    os.unlink(os.path.join(strategy, "ckpt_strategy_rank_0.ckpt"))
    message = "has the strategies of pipeline stages 1: the others"
    refused(AdapterFormatError, part(message), gather_adapter, ranks, str(tmp_path / "out"), "peft", strategy)


def test_a_truncated_file_and_one_that_was_changed(run):
    ranks, _, refuse = run
    with open(file_of(ranks, 2), "rb") as file:
        content = file.read()
    with open(file_of(ranks, 2), "wb") as file:
        file.write(content[: len(content) // 2])
    refuse(TruncatedAdapterError, "rank_2")
    changed = bytearray(content)
    changed[-5] ^= 1
    with open(file_of(ranks, 2), "wb") as file:
        file.write(changed)
    refuse(AdapterFormatError, "differs between")


def test_a_slice_that_no_rank_has(run):
    ranks, _, refuse = run
    name = sharded_runs.cell(0, "wq", "b")
    for rank in (1, 3):
        kept = {key: p for key, p in ms.load_checkpoint(file_of(ranks, rank)).items() if key != name}
        ms.save_checkpoint([{"name": key, "data": p} for key, p in kept.items()], file_of(ranks, rank))
    refuse(MissingTensorsError, f"{name} is incomplete: 64 of its 128 elements")


def test_slices_of_different_shapes_or_dtypes(run):
    ranks, _, refuse = run
    parameters = ms.load_checkpoint(file_of(ranks, 3))
    for array, message in (
        (np.ones((4, 8), np.float32), "of one step of one run"),
        (np.ones((8, 8), np.float16), "of one step of one run"),
        (np.ones(3, np.float32), "the strategy of another run"),
    ):
        parameters[sharded_runs.cell(0, "wq", "b")] = ms.Parameter(ms.Tensor(array))
        ms.save_checkpoint([{"name": key, "data": p} for key, p in parameters.items()], file_of(ranks, 3))
        refuse(ShapeMismatchError, message)


def test_overlapping_slices():
    def piece(source, begin):
        return Piece(source, Slice((4, 2), (begin, 0), (2, 2)), np.ones((2, 2)))

    message = "w has overlapping slices: the second holds elements"
    refused(ShapeMismatchError, part(message), strategy.join, "w", [piece("the first", 0), piece("the second", 1)])


def test_a_layout_that_contradicts_itself(tmp_path):
    for layout, message in (
        (Layout((2, 2), ((2,), ())), "tensor map"),
        (Layout((2, 2), ((0,), (0,))), "tensor map"),
        (Layout((2, 2), ((0,), ()), 2, 3), "optimizer parallelism cannot cut"),
        (Layout((2, 2), ((0,), (1,)), 1, 2), "optimizer parallelism cannot cut"),
        (Layout((2, 2), ((0,), ()), uneven=True), "uneven slices"),
    ):
        refused(AdapterFormatError, part(message), strategy.slice_of, layout, 0, (4, 4), "w")
    stages = {0: {"v": Layout((2,), ((),)), "w": Layout((4,), ((),))}}
    refused(AdapterFormatError, part("spreads v over 2 devices and w over 4"), Strategy, stages, "it")


def test_lora_alpha_that_nothing_states_or_two_things_state(run):
    refuse = run[2]
    config = LoraConfig(lora_rank=4, lora_alpha=3.0, target_modules=".*")
    refuse(ScaleMismatchError, "give the YAML of the run (--config run.yaml), or the number", settings=RunSettings())
    refuse(RankMismatchError, "run.yaml says 4", settings=RunSettings(config, source="run.yaml"))
    refused(ScaleMismatchError, part("lora_alpha is given twice"), RunSettings, config, 3.0)
    pissa = LoraConfig(lora_rank=4, lora_alpha=3.0, lora_init="pissa", target_modules=".*")
    refused(AdapterError, part("run.yaml has lora_init pissa"), RunSettings, pissa, source="run.yaml")
    refused(ConfigError, part("run.yaml has no pet_config"), pet_config_of, {}, "run.yaml")
    assert heads_of({"num_heads": 8, "hidden_size": 64}, Heads()) == Heads(8, 8)


def test_an_output_that_is_there(run, tmp_path):
    ranks, strategy, _ = run
    os.mkdir(tmp_path / "out")
    refused(LoraError, part("exists already"), gather_adapter, ranks, str(tmp_path / "out"), "peft", strategy)


def test_joined_cells_need_the_sizes_of_the_attention(tmp_path):
    scheme, rng = Scheme(mp=2), np.random.default_rng(0)
    shapes = {sharded_runs.cell(0, "w_qkv", "a"): (4, 16), sharded_runs.cell(0, "w_qkv", "b"): (32, 4)}
    whole = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    strategy = sharded_runs.write_strategy(tmp_path / "strategy", scheme, whole)
    ranks, settings = sharded_runs.write_ranks(tmp_path / "ranks", scheme, whole), RunSettings(lora_alpha=2.0)
    out = str(tmp_path / "out")
    refused(
        AdapterError, part("model.layers.0.attention.w_qkv"), gather_adapter, ranks, out, "peft", strategy, settings
    )
