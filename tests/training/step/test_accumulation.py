"""Gradient accumulation: what the YAML becomes, and that a batch in micro-batches trains what it trains whole."""

import mindspore as ms
import numpy as np
import pytest
from mindformers.core.optim import AdamW
from mindformers.models.llama import LlamaConfig, LlamaForCausalLM
from mindformers.tools.register import MindFormerConfig
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import ConfigError
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.key_ranges import check_keys
from mindlora.run.checks.training import check_training
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch.preflight import set_micro_batches
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.support.cpu_llama import ON_CPU

ROWS, LENGTH, VOCABULARY, STEPS = 8, 16, 64, 8
LLAMA = {
    "seq_length": LENGTH,
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "pad_token_id": 3,
    **ON_CPU,
}


@pytest.fixture(scope="module")
def batches():
    """Batches of rows of which the first count nearly all their labels, and the last nearly none."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, VOCABULARY, (STEPS, ROWS, LENGTH + 1)).astype(np.int32)
    counted = rng.random(tokens.shape) < np.linspace(0.95, 0.05, ROWS)[:, None]
    return tokens, np.where(counted, tokens, -100).astype(np.int32)


def trained(batches, micro_batches, weigh_alike=False):
    """Returns the losses of a run, its adapter, and its train step."""
    ms.set_seed(7)
    network = LlamaForCausalLM(LlamaConfig(**LLAMA))
    rng = np.random.default_rng(3)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(rng.normal(0, 0.1, parameter.shape).astype(np.float32)))
    apply_lora(network, LoraConfig(lora_rank=4, target_modules=".*wq|.*wv|.*w2"))
    freeze_base(network)
    for parameter in network.trainable_params():
        parameter.set_data(Tensor(rng.normal(0, 0.05, parameter.shape).astype(np.float32)))
    step = LoraTrainOneStepCell(network, AdamW(network.trainable_params(), 1e-2), micro_batches=micro_batches)
    if weigh_alike:
        network.loss.calculate_per_token_loss = False
    step.set_train()
    losses = [float(step(Tensor(tokens), Tensor(labels))[0].asnumpy()) for tokens, labels in zip(*batches)]
    return np.array(losses), {p.name: p.asnumpy().copy() for p in network.trainable_params()}, step


def distance(first, second):
    return max(np.abs(first[name] - second[name]).max() for name in first)


def test_four_micro_batches_train_what_one_batch_trains(batches, pynative_mode):
    """The micro-batches of a graph are in test_invocation and test_token_gradients."""
    losses, whole, _ = trained(batches, 1)
    _, alike, _ = trained(batches, 4, weigh_alike=True)
    in_parts_losses, in_parts, step = trained(batches, 4)
    np.testing.assert_allclose(in_parts_losses, losses, atol=1e-6)
    assert distance(whole, in_parts) <= 1e-6
    # Had each micro-batch the same weight, the run would have been another one.
    assert distance(whole, alike) > 1e-3
    assert int(step.optimizer.global_step.asnumpy().item()) == STEPS
    assert step.last_record().tokens == (batches[1][-1][:, 1:] != -100).sum()


def config(**changes):
    """A YAML with gradient_accumulation_steps 4 and batches of 3 rows."""
    return MindFormerConfig(
        **{
            "run_mode": "finetune",
            "runner_config": {"gradient_accumulation_steps": 4, "batch_size": 3},
            "runner_wrapper": {"type": "LoraTrainOneStepCell"},
            "train_dataset": {"drop_remainder": True},
            "use_parallel": False,
            "parallel": {"parallel_mode": 0},
            **changes,
        }
    )


@pytest.mark.parametrize("use_parallel", [False, True])
def test_the_yaml_asks_the_train_step_for_micro_batches(use_parallel):
    found = config(use_parallel=use_parallel)
    set_micro_batches(found)
    assert found.runner_wrapper.micro_batches == 4
    assert dict(found.runner_config) == {"gradient_accumulation_steps": 1, "batch_size": 12}


@pytest.mark.parametrize(
    "changes",
    [
        {"runner_config": {"gradient_accumulation_steps": 1, "batch_size": 3}},
        {"runner_config": {"gradient_accumulation_steps": None, "batch_size": 3}},
        {"use_parallel": True, "parallel": {"parallel_mode": 1}},
        {"use_parallel": True, "parallel": {"parallel_mode": "SEMI_AUTO_PARALLEL"}},
    ],
    ids=["one step", "not set", "semi-automatic", "semi-automatic by name"],
)
def test_a_yaml_is_left_alone_where_there_is_nothing_to_do(changes):
    found = config(**changes)
    set_micro_batches(found)
    assert dict(found) == dict(config(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"runner_config": {"gradient_accumulation_steps": 2.5, "batch_size": 3}},
            "runner_config.gradient_accumulation_steps is 2.5, but it must be a whole number of at least 1",
        ),
        (
            {"runner_wrapper": {"type": "MFTrainOneStepCell"}},
            "runner_wrapper.type is MFTrainOneStepCell, which accumulates nothing alone and in data parallel. Set "
            "runner_wrapper.type: LoraTrainOneStepCell",
        ),
        ({"runner_wrapper": None}, "runner_wrapper.type is MFTrainOneStepCell, which accumulates nothing"),
        (
            {"runner_wrapper": {"type": "LoraTrainOneStepCell", "micro_batches": 2}},
            "both runner_config.gradient_accumulation_steps and runner_wrapper.micro_batches",
        ),
        ({"train_dataset": {"drop_remainder": False}}, "train_dataset.drop_remainder is not True"),
    ],
)
def test_what_cannot_accumulate_is_refused(changes, message):
    with pytest.raises(ConfigError) as caught:
        run = YamlRun(config(**changes))
        refuse([*check_keys(run), *check_training(run)])
    assert message in str(caught.value)
