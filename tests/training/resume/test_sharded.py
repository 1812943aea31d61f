"""Sharded runs in one process: what a YAML cannot have, what starts from which adapter, and what MindSpore cuts."""

import glob
import os
import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora
from mindlora.core.errors import (
    BackendError,
    ConfigMistakes,
    MissingTensorsError,
    ScaleMismatchError,
    ShapeMismatchError,
    UnexpectedTensorsError,
)
from mindlora.core.formats import strategy_file
from mindlora.core.formats.strategy_file import Layout
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.sharding.scatter import scatter_adapter
from mindlora.files.adapters.sharding.strategy import cut
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.parallel import check_sharded, is_scattered
from mindlora.run.yaml_run import YamlRun
from tests.support.refusals import part, refused

RANK, IN, OUT, ALPHA = 4, 8, 6, 12.0
A, B = "wq.mindpet_delta_lora_a", "wq.mindpet_delta_lora_b"
# As MindSpore records them for four ranks that cut the rows: device matrix, map, slice, field, even, group, whole.
ROWS = {A: ([2, 2], [-1, -1], [4, 8], 0, True, "", [], []), B: ([2, 2], [0, -1], [3, 4], 0, True, "", [], [])}
LAYOUTS = {A: Layout((2, 2), ((), ())), B: Layout((2, 2), ((0,), ()))}


class Model(nn.Cell):
    """Stands for a MindFormers model."""

    def __init__(self, alpha=ALPHA, targets="wq"):
        super().__init__()
        self.wq, self.wk, self.config = nn.Dense(IN, OUT), nn.Dense(IN, OUT), types.SimpleNamespace()
        apply_lora(self, LoraConfig(lora_rank=RANK, lora_alpha=alpha, target_modules=targets))
        freeze_base(self)


@pytest.fixture
def whole():
    rng = np.random.default_rng(0)
    return {A: rng.normal(size=(RANK, IN)).astype(np.float32), B: rng.normal(size=(OUT, RANK)).astype(np.float32)}


@pytest.fixture
def adapter(whole, tmp_path):
    """A folder with the whole adapter."""
    files.write(Adapter({("wq", "A"): whole[A], ("wq", "B"): whole[B]}, {"wq": ALPHA}), str(tmp_path / "adapter"))
    return str(tmp_path / "adapter")


@pytest.fixture
def scattered(adapter, tmp_path):
    """Its slices for four ranks."""
    strategy_file.write(str(tmp_path / "strategy.json"), 0, LAYOUTS)
    scatter_adapter(adapter, str(tmp_path / "slices"), str(tmp_path / "strategy.json"))
    return str(tmp_path / "slices")


# What a YAML cannot have

CUTS = {
    "parallel_config.model_parallel is 2": {"parallel_config": {"model_parallel": 2}},
    "parallel_config.pipeline_stage is 4": {"parallel_config": {"pipeline_stage": 4}},
    "parallel_config.expert_parallel is 2": {"parallel_config": {"model_parallel": 1, "expert_parallel": 2}},
    "parallel.enable_parallel_optimizer is True": {"parallel": {"enable_parallel_optimizer": True, "parallel_mode": 1}},
}


def config_of(cut, checkpoint=None, **pet_config):
    callbacks = [{"type": "LoraCheckpoint", **(checkpoint or {})}]
    model = {"model_config": {"pet_config": pet_config}}
    return {"run_mode": "finetune", "use_parallel": True, "model": model, "callbacks": callbacks, **cut}


@pytest.mark.parametrize("found", CUTS)
@pytest.mark.parametrize(
    "field, value", [("use_dora", True), ("use_vera", True), ("use_adalora", True), ("lora_init", "pissa")]
)
def test_adapters_that_need_whole_weights_are_refused_by_name(found, field, value):
    name = field if value is True else f"{field} {value}"
    config = config_of(CUTS[found], **{field: value})
    refused(
        ConfigMistakes, part(f"pet_config has {name} and {found}: each device"), refuse, check_sharded(YamlRun(config))
    )
    assert not list(check_sharded(YamlRun({**config, "use_parallel": False})))
    data_parallel = {"parallel": {"enable_parallel_optimizer": True, "parallel_mode": 0}}
    assert not list(check_sharded(YamlRun(config_of(data_parallel, **{field: value}))))


@pytest.mark.parametrize("found", CUTS)
def test_lora_checkpoint_saves_in_a_sharded_run_but_does_not_resume_one(found):
    assert not list(check_sharded(YamlRun(config_of(CUTS[found], lora_init="kaiming"))))
    assert not list(check_sharded(YamlRun(config_of(CUTS[found], lora_init="pissa", adapter_path="adapter"))))
    message = f"LoraCheckpoint has resume: True and {found}: LoraCheckpoint joins"
    refused(ConfigMistakes, part(message), refuse, check_sharded(YamlRun(config_of(CUTS[found], {"resume": True}))))


def test_a_folder_of_slices_in_adapter_path_brings_the_callback_that_loads_them(mindformers, scattered, adapter):
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch import preflight

    def prepared(path, parallel):
        model = {"model_config": {"pet_config": {"adapter_path": path}}}
        config = MindFormerConfig(use_parallel=parallel, model=model, callbacks=[{"type": "LoraCheckpoint"}])
        preflight._fill_adapter_slices(config)
        return [callback["type"] for callback in config.callbacks]

    assert is_scattered(scattered) and not is_scattered(adapter) and not is_scattered(None)
    assert prepared(scattered, True) == ["AdapterSlices", "LoraCheckpoint"]
    assert prepared(adapter, False) == ["LoraCheckpoint"]
    alone = {**config_of({}, adapter_path=scattered), "use_parallel": False}
    refused(ConfigMistakes, part(f"adapter_path: {scattered} holds slices"), refuse, check_sharded(YamlRun(alone)))


# Starting from an adapter


def test_mindspore_cuts_an_adapter_that_was_loaded_whole_as_scatter_cuts_it(semi_auto_parallel, adapter, whole):
    from mindspore.parallel._tensor import _load_tensor_by_layout

    model = Model()
    load_lora(model, adapter)
    for name, parameter in ((A, model.wq.mindpet_delta_lora_a), (B, model.wq.mindpet_delta_lora_b)):
        # So MindSpore takes the values as they are, and cuts them when it compiles.
        assert not parameter.has_init and not parameter.sliced and parameter.shape == whole[name].shape
        for rank in range(4):
            judged = _load_tensor_by_layout(parameter, tuple(ROWS[name]), rank).asnumpy()
            assert judged.tobytes() == cut(whole[name], LAYOUTS[name], rank, name).tobytes()


def begin(model, path, rank, monkeypatch, layouts=None):
    """Begins a run with AdapterSlices on one of four ranks."""
    from mindlora.training.callbacks import initial_weights

    monkeypatch.setattr(initial_weights, "get_real_rank", lambda: rank)
    network = types.SimpleNamespace(parameter_layout_dict=ROWS if layouts is None else layouts)
    monkeypatch.setattr(initial_weights, "base_of", lambda _: model)
    params = types.SimpleNamespace(train_network=network)
    initial_weights.AdapterSlices(path).on_train_begin(types.SimpleNamespace(original_args=lambda: params))


def set_slices(model, rows=3):
    """Makes the parameters as long as a rank's slices are."""
    model.wq.mindpet_delta_lora_b.set_data(ms.Tensor(np.zeros((rows, RANK), np.float32)), slice_shape=True)
    return model


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_loads_its_own_slices(mindformers, scattered, whole, rank, monkeypatch):
    model = set_slices(Model())
    begin(model, scattered, rank, monkeypatch)
    assert model.wq.mindpet_delta_lora_a.asnumpy().tobytes() == whole[A].tobytes()
    own = model.wq.mindpet_delta_lora_b
    assert own.sliced and own.asnumpy().tobytes() == np.split(whole[B], 2)[rank % 2].tobytes()


def test_slices_that_are_not_this_ranks_are_refused_and_nothing_is_loaded(mindformers, scattered, monkeypatch):
    def case(kind, message, model, layouts=None, rank=0):
        before = model.wq.mindpet_delta_lora_a.asnumpy().copy()
        refused(kind, part(message), begin, model, scattered, rank, monkeypatch, layouts)
        assert np.array_equal(model.wq.mindpet_delta_lora_a.asnumpy(), before)

    case(ShapeMismatchError, "is a slice [3, 4], but this rank's parameter is [6, 4]", Model())
    case(ScaleMismatchError, "was trained with lora_alpha 12", set_slices(Model(alpha=6.0)))
    case(UnexpectedTensorsError, f"holds {B}, which this rank does not have", set_slices(Model()), {A: ROWS[A]})
    case(MissingTensorsError, "lacks wk.mindpet_delta_lora_", set_slices(Model(targets="wq|wk")), {})
    (path,) = glob.glob(os.path.join(scattered, "rank_1", "*"))
    os.unlink(path)
    case(MissingTensorsError, "holds no checkpoint", set_slices(Model()), rank=1)


def test_the_plugin_leaves_slices_to_the_callback(mindformers, scattered):
    from mindlora.run.checks.pet_config import PetLoraConfig
    from mindlora.training.model.pet import MindloraModel

    config = PetLoraConfig(lora_rank=RANK, lora_alpha=ALPHA, target_modules="wq", adapter_path=scattered)
    rest = {"_leave_frozen": lambda _: None, "_make_lean": lambda _: None}
    wrapper = types.SimpleNamespace(config=types.SimpleNamespace(pet_config=config), **rest)
    network = nn.SequentialCell()
    network.wq = nn.Dense(IN, OUT)
    MindloraModel.add_adapter(wrapper, network)
    assert not network.wq.mindpet_delta_lora_b.asnumpy().any()


# What the running network knows of its slices


def test_only_a_network_that_holds_parts_is_sharded():
    from mindlora.training.resume import sharded_adapter

    assert not sharded_adapter.is_sharded(Model(), {})
    assert sharded_adapter.is_sharded(set_slices(Model()), {})
    ms.set_auto_parallel_context(pipeline_stages=2)
    try:
        assert sharded_adapter.is_sharded(Model(), {})
    finally:
        ms.reset_auto_parallel_context()


@pytest.mark.parametrize(
    "kind",
    [{}, {"use_dora": True}, {"use_vera": True}, {"use_adalora": True, "init_r": 4, "target_r": 2}],
    ids=["plain", "DoRA", "VeRA", "AdaLoRA"],
)
def test_a_whole_adapter_of_any_kind_is_not_sharded(kind):
    from mindlora.training.resume import sharded_adapter

    network = nn.SequentialCell()
    network.embedding, network.wq, network.conv = nn.Embedding(12, 8), nn.Dense(8, 6), nn.Conv2d(3, 4, 3)
    targets = "wq" if kind else "wq|embedding|conv"
    apply_lora(network, LoraConfig(target_modules=targets, **kind))
    assert not sharded_adapter.is_sharded(network, {})


def test_slices_of_an_earlier_run_are_set_aside_with_its_steps(mindformers, tmp_path):
    from mindlora.training.resume import training_state

    for folder in ("step_2", "step_4", "slices/step_2", "slices/step_4"):
        os.makedirs(tmp_path / "saved" / folder)
    aside = training_state.set_aside(str(tmp_path / "saved"), 2)
    assert sorted(os.listdir(aside)) == ["slices", "step_4"] and os.listdir(os.path.join(aside, "slices")) == ["step_4"]
    assert sorted(os.listdir(tmp_path / "saved")) == ["earlier_run_1", "slices", "step_2"]


def test_an_operator_that_the_device_lacks_is_named(monkeypatch):
    from mindlora.training.resume import collectives

    def lacking():
        raise TypeError("Select CPU operator[AllGather] fail!\nand more")

    monkeypatch.setattr(collectives.ops, "AllGather", lacking)
    message = (
        "AllGather of int32 cannot run on this device or in this mode: Select CPU operator[AllGather] fail. Use "
        "another device or mode."
    )
    refused(BackendError, message, collectives.all_gather, np.zeros(3, np.uint8))


def test_an_operator_that_moves_no_data_is_told_from_one_that_does(monkeypatch):
    from mindlora.training.resume import collectives

    monkeypatch.setattr(collectives, "get_group_size", lambda: 2)
    monkeypatch.setattr(collectives, "get_rank", lambda: 1)
    content = np.array([1, 2, 3, 4], np.uint8)
    words = content.view(np.int32)
    other = np.array([7], np.int32)
    monkeypatch.setattr(collectives, "_run", lambda *_: np.concatenate((other, words)))
    np.testing.assert_array_equal(collectives.all_gather(content), [[7, 0, 0, 0], content])
    monkeypatch.setattr(collectives, "_run", lambda *_: np.zeros(2, np.int32))
    message = (
        "AllGather gives back other bytes than this rank has sent, as in a dry run (MS_SIMULATION_LEVEL), where it "
        "moves no data. Run on devices."
    )
    refused(BackendError, message, collectives.all_gather, content)
