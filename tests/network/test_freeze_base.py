"""freeze_base and trainable_summary: which parameters train, and which of them training changes."""

import logging
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoraError, apply_lora, freeze_base, trainable_summary
from mindlora.core.errors import TargetError
from tests.support.adapted_networks import X, on
from tests.support.networks import TinyModel, WeightedSum, adapters, snapshot

# Freezing -------------------------------------------------------------------------------------------------------


def trainable(network):
    return [p.name for p in network.get_parameters() if p.requires_grad]


@pytest.mark.parametrize("config", [None, LoraConfig()])
def test_freeze_base_leaves_a_and_b_alone_to_train(config):
    network = TinyModel()
    on(network, ["wq", "lm_head"])
    freeze_base(network, config)
    assert trainable(network) == list(adapters(network))
    assert [p.name for p in network.trainable_params()] == list(adapters(network))


def test_frozen_parameters_keep_dtype_and_bytes():
    network = TinyModel()
    on(network)
    network.model.layers[0].to_float(ms.float16)
    before = {p.name: (p.dtype, p.asnumpy().tobytes()) for p in network.get_parameters()}
    freeze_base(network)
    assert {p.name: (p.dtype, p.asnumpy().tobytes()) for p in network.get_parameters()} == before


def test_freeze_exclude_trains_base_parameters_too_and_says_so(caplog):
    network = TinyModel()
    on(network, ["wq"])
    with caplog.at_level(logging.WARNING, "mindlora"):
        freeze_base(network, LoraConfig(freeze_exclude=["*attention_norm.*", "lm_head.weight"]))
    norms = [f"model.layers.{i}.attention_norm.{half}" for i in range(2) for half in ("beta", "gamma")]
    assert sorted(set(trainable(network)) - set(adapters(network))) == ["lm_head.weight"] + norms
    assert set(adapters(network)) < set(trainable(network))
    assert [record.getMessage() for record in caplog.records] == [
        "Training 5 base parameters besides LoRA (freeze_exclude): lm_head.weight, "
        "model.layers.{0..1}.attention_norm.beta, model.layers.{0..1}.attention_norm.gamma. A saved adapter holds "
        "only LoRA tensors and the modules of modules_to_save: name these there, or save them with "
        "mindspore.save_checkpoint."
    ]


def test_freeze_include_freezes_adapters_too():
    network = TinyModel()
    on(network, ["wq"])
    freeze_base(network, LoraConfig(freeze_include=["model.layers.0.*"]))
    assert trainable(network) == [name for name in adapters(network) if name.startswith("model.layers.1.")]


def test_a_parameter_in_both_lists_is_as_if_in_neither():
    network = TinyModel()
    on(network, ["wq"])
    freeze_base(network, LoraConfig(freeze_include=["*layers.0*"], freeze_exclude=["*layers.0*", "lm_head.weight"]))
    assert set(trainable(network)) == {*adapters(network), "lm_head.weight"}


def test_patterns_are_shell_style_and_case_sensitive_on_full_names():
    network = TinyModel()
    on(network, ["wq"])
    freeze_base(network, LoraConfig(freeze_exclude=["model.layers.?.attention.w[kv].weight"]))
    assert len(trainable(network)) == 4 + 4
    for pattern in ("layers.0.*", "LM_HEAD.weight", "lm_head"):
        with pytest.raises(TargetError, match=re.escape(f"pattern '{pattern}' matches no parameter.")):
            freeze_base(network, LoraConfig(freeze_exclude=[pattern]))


@pytest.mark.parametrize("field", ["freeze_include", "freeze_exclude"])
def test_a_pattern_without_a_match_is_an_error_that_lists_the_parameters(field):
    network = nn.SequentialCell(nn.Dense(6, 5), nn.Dense(5, 4, has_bias=False))
    on(network, ["0"])
    with pytest.raises(TargetError) as error:
        freeze_base(network, LoraConfig(**{field: ["0.*", "norm*"]}))
    assert str(error.value) == (
        f"{field} pattern 'norm*' matches no parameter. Choose from {{0..1}}.weight, 0.bias, "
        "0.mindpet_delta_lora_a, 0.mindpet_delta_lora_b."
    )
    assert all(p.requires_grad for p in network.get_parameters())


def test_freezing_everything_is_an_error():
    network = TinyModel()
    on(network, ["wq"])
    with pytest.raises(TargetError) as error:
        freeze_base(network, LoraConfig(freeze_include=["*"]))
    assert str(error.value) == "freeze_include ['*'] freezes everything: nothing is left to train. Narrow it."


def test_a_module_that_is_saved_under_both_of_its_names_counts_once():
    network = TinyModel()
    modules = ["w1", "gate_proj"]
    report = apply_lora(network, LoraConfig(lora_rank=2, target_modules=["wq"], modules_to_save=modules))
    freeze_base(network)
    assert report.trainable == sum(p.size for p in network.trainable_params())


def test_without_adapters_there_is_nothing_to_train():
    network = TinyModel()
    with pytest.raises(LoraError) as error:
        freeze_base(network)
    assert str(error.value) == (
        "The network holds no LoRADense cell: freezing the base would leave nothing to train. Call apply_lora first."
    )
    assert all(p.requires_grad for p in network.get_parameters())


# Training -------------------------------------------------------------------------------------------------------


def test_twenty_steps_move_a_and_b_and_no_bit_of_the_base(mode):
    network = TinyModel(1)
    apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=4, target_modules=["wq", "w1", "lm_head"]))
    freeze_base(network)
    before = snapshot(network)
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=0.01, weight_decay=0.1)
    step = nn.TrainOneStepCell(WeightedSum(network), optimizer).set_train()
    weights = Tensor(np.random.default_rng(1).normal(size=(3, 8)).astype(np.float32))
    for _ in range(20):
        step(Tensor(X), weights)
    after = snapshot(network)
    moved = {name for name in before if before[name] != after[name]}
    assert moved == set(adapters(network))
    states = {p.name for p in optimizer.get_parameters()} - {p.name for p in network.get_parameters()}
    assert {name for name in states if any(base in name for base in set(before) - set(adapters(network)))} == set()
    assert {name.split(".", 1)[1] for name in states if name.startswith("adam_m.")} == set(adapters(network))


def test_frozen_weights_get_no_gradient(mode):
    network = TinyModel(1)
    on(network, ["wq"])
    freeze_base(network)
    names = [p.name for p in network.trainable_params()]
    gradients = ms.grad(WeightedSum(network), None, network.trainable_params())(
        Tensor(X), Tensor(np.ones((3, 8), np.float32))
    )
    assert names == list(adapters(network)) and len(gradients) == 2
    assert all(np.abs(g.asnumpy()).max() > 0 for g in gradients)


def test_the_first_step_moves_only_b():
    network = nn.SequentialCell(nn.Dense(6, 5))
    apply_lora(network, LoraConfig(lora_rank=2, target_modules="all-linear"))
    of_a, of_b = ms.grad(WeightedSum(network), None, network[0].lora_parameters())(
        Tensor(X), Tensor(np.ones((3, 5), np.float32))
    )
    assert not of_a.asnumpy().any() and of_b.asnumpy().all()


# The summary ----------------------------------------------------------------------------------------------------


def test_summary_is_a_table_and_the_line_of_peft():
    network = TinyModel()
    on(network, ["wq", "wk", "lm_head"])
    freeze_base(network)
    assert trainable_summary(network) == "\n".join(
        [
            "adapters on                       cells  in x out  rank  alpha  parameters",
            "model.layers.{0..1}.attention.wq      2     6 x 6     2      3          48",
            "model.layers.{0..1}.attention.wk      2     6 x 4     2      3          40",
            "lm_head                               1     6 x 8     2      3          28",
            "trainable params: 116 || all params: 800 || trainable%: 14.5000",
        ]
    )


def test_summary_counts_what_freeze_base_left():
    network = nn.SequentialCell(nn.Dense(1000, 300, has_bias=False))
    apply_lora(network, LoraConfig(lora_rank=4, target_modules="all-linear"))
    assert trainable_summary(network).splitlines()[-1] == (
        "trainable params: 305,200 || all params: 305,200 || trainable%: 100.0000"
    )
    freeze_base(network)
    assert trainable_summary(network).splitlines()[-1] == (
        "trainable params: 5,200 || all params: 305,200 || trainable%: 1.7038"
    )


def test_summary_of_a_network_without_adapters_is_the_last_line_alone():
    assert trainable_summary(nn.Dense(6, 5, has_bias=False)) == (
        "trainable params: 30 || all params: 30 || trainable%: 100.0000"
    )
    assert trainable_summary(nn.ReLU()) == "trainable params: 0 || all params: 0 || trainable%: 0.0000"
