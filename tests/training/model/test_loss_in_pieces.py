"""Head and loss in pieces in the train step: as with the logits of all tokens, or a reason why not."""

import contextlib
import functools
import logging
import types

import numpy as np
import pytest
from mindformers.models.build_model import build_network
from mindformers.tools.register import MindFormerConfig
from mindformers.wrapper import wrapper
from mindspore import Tensor, nn

from mindlora.network.cells.label_losses import LabelLosses
from mindlora.training.held_out.cells import HeldOutLossCell
from mindlora.training.launch import hooks  # noqa: F401
from mindlora.training.log import logger
from mindlora.training.model.mcore_model import gpt_model_of
from mindlora.training.model.network import base_of
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.support import tiny_runs
from tests.support.mcore_networks import in_training, scaled, tiny_deepseek_v3, tiny_qwen3, tokens, with_adapters
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.tiny_runs import IGNORED, PAD

pytestmark = pytest.mark.usefixtures("module_in_graph_mode")

ROWS, PIECE, STEPS = 4, 5, 3
PET = {"lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.0}


def llama(**pet):
    """A tiny Llama with adapters, the same at each call."""
    config = MindFormerConfig(tiny_runs.LORA_YAML)
    config.model.model_config.update({**tiny_runs.MODEL, "pad_token_id": PAD})
    config.model.model_config.pet_config.update({**PET, "target_modules": ".*wq|.*w2", **pet})
    return filled_adapters(build_network(config.model))


def mcore(make, **pet):
    """The same of an mcore model, whose logits are of the size of a trained one's."""
    with in_training():
        return filled_adapters(with_adapters(scaled(make(), 0.5), **{**PET, "target_modules": ".*linear_proj", **pet}))


def filled_adapters(network):
    for number, parameter in enumerate(network.get_parameters()):
        rng = np.random.default_rng(number)
        if "norm" not in parameter.name and "Float" in str(parameter.dtype):
            values = rng.normal(size=parameter.shape, scale=0.2).astype(np.float32)
            parameter.set_data(Tensor(values, parameter.dtype))
    return network


def batch(seed):
    """Rows that differ in how many labels count: none of the first one's."""
    rng = np.random.default_rng(seed)
    ids = tokens(ROWS, tiny_runs.SEQUENCE + 1, seed)
    labels = np.where(rng.random(ids.shape) < np.linspace(0, 0.9, ROWS)[:, None], ids, IGNORED).astype(np.int32)
    labels[1, -1] = ids[1, -1] = tiny_runs.VOCABULARY - 1
    return Tensor(ids), Tensor(labels)


def trained(network, setting, steps=STEPS, **arguments):
    """Trains a network; returns its step, the losses and the norms of the gradient, and what was trained."""
    optimizer = nn.SGD(network.trainable_params(), 0.05)
    with pytest.MonkeyPatch.context() as patch:
        # What a YAML's use_legacy says.
        patch.setattr(wrapper, "is_legacy_model", lambda: gpt_model_of(network) is None)
        step = LoraTrainOneStepCell(network, optimizer, loss_in_pieces=setting, **arguments)
    step.set_train()
    records = []
    for number in range(steps):
        step(*batch(number))
        records.append(step.last_record())
    return types.SimpleNamespace(
        step=step,
        losses=np.array([record.loss for record in records]),
        norms=np.array([record.gradient_norm for record in records]),
        tokens=[record.tokens for record in records],
        weights={p.name: p.asnumpy() for p in network.trainable_params()},
    )


def losses_of_labels(network):
    return [cell for _, cell in network.cells_and_names() if isinstance(cell, LabelLosses)]


def compare(make, piece=PIECE, losses=1, in_pieces=contextlib.nullcontext, **arguments):
    """Trains twins whole, in PyNative, and in pieces, with as many LabelLosses, and asserts that they do the same.

    The one in pieces is a graph, unless ``in_pieces`` is mcore_in_pynative. Returns it.
    """
    names = [p.name for p in make().get_parameters()]
    with mcore_in_pynative():
        whole = trained(make(), False, **arguments)
    with in_pieces():
        pieces = trained(network := make(), piece, **arguments)
    assert len(losses_of_labels(pieces.step)) == losses and not losses_of_labels(whole.step)
    assert [p.name for p in network.get_parameters()] == names
    # A model that predicts further tokens counts none.
    assert pieces.tokens == whole.tokens and whole.tokens[0] != 0
    np.testing.assert_allclose(pieces.losses[0], whole.losses[0], rtol=1e-6)
    np.testing.assert_allclose(pieces.norms[0], whole.norms[0], rtol=2e-6)
    np.testing.assert_allclose(pieces.losses, whole.losses, rtol=1e-5)
    assert whole.losses[-1] != whole.losses[0]
    for name, weight in whole.weights.items():
        np.testing.assert_allclose(pieces.weights[name], weight, rtol=0, atol=1e-5 * np.abs(weight).max(), err_msg=name)
    return pieces


def held_out(step):
    """The held-out loss of a batch, and the same by NumPy of the model's logits in evaluation."""
    network, (ids, labels) = base_of(step), batch(100)
    cell = HeldOutLossCell(network, IGNORED)
    cell.set_train(False)
    total, count = (float(value.asnumpy()) for value in cell(ids, labels))
    network.set_train(False)
    with mcore_in_pynative():
        logits, _, mask = (output.asnumpy().astype(np.float64) for output in network(ids[:, :-1], labels[:, 1:]))
    assert logits.shape[-1] == tiny_runs.VOCABULARY
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, np.maximum(labels.asnumpy()[:, 1:], 0)[..., None], -1)[..., 0]
    assert count == mask.sum() > 0
    return total, -(picked * mask).sum()


def test_a_qwen3_whose_head_trains_in_micro_batches():
    """A Llama with a frozen head is in test_parity, which compares each loss with that of MindFormers' own LoRA."""
    pieces = compare(lambda: mcore(tiny_qwen3, modules_to_save=["lm_head"]), micro_batches=2)
    assert any("output_layer.weight" in name for name in pieces.weights)
    found, expected = held_out(pieces.step)
    assert found == pytest.approx(expected, rel=1e-6)


def test_lora_on_the_head_of_a_llama():
    adapted = functools.partial(llama, target_modules=".*lm_head|.*w2")
    pieces = compare(adapted, in_pieces=mcore_in_pynative)
    assert {name[-1] for name in pieces.weights if "lm_head" in name} == {"a", "b"}
    found, expected = held_out(pieces.step)
    assert found == pytest.approx(expected, rel=1e-6)


ON_HEAD = {"target_modules": ".*linear_proj|.*output_layer"}


# The head of the layer that predicts a further token has no adapter; it learns with the weight that it shares.
@pytest.mark.parametrize(
    "pet, in_pieces",
    [
        pytest.param(ON_HEAD, mcore_in_pynative, id="an adapter on the head"),
        pytest.param(ON_HEAD, contextlib.nullcontext, id="an adapter on the head, in a graph", marks=pytest.mark.long),
        pytest.param({"modules_to_save": ["lm_head"]}, mcore_in_pynative, id="a head that trains"),
    ],
)
def test_a_deepseek_v3_that_predicts_a_further_token(pet, in_pieces):
    sizes = {"num_nextn_predict_layers": 1, "mtp_loss_scaling_factor": 0.3, "first_k_dense_replace": 1}
    pieces = compare(lambda: mcore(lambda: tiny_deepseek_v3(**sizes), **pet), 24, losses=2, in_pieces=in_pieces)
    assert any(key.startswith("mtp.layers.0") for key in pieces.weights)


def test_lora_on_the_head_of_a_qwen3_in_micro_batches():
    adapted = functools.partial(mcore, tiny_qwen3, target_modules="output_layer")
    pieces = compare(adapted, in_pieces=mcore_in_pynative, micro_batches=2)
    assert {name[-1] for name in pieces.weights if "output_layer" in name} == {"a", "b"}


@pytest.mark.parametrize(
    "pet, setting, expected",
    [
        (
            {"target_modules": ".*lm_head", "use_dora": True},
            True,
            "made at once, as the output head has an adapter of DoRA.",
        ),
        ({}, False, "made at once, as runner_wrapper.loss_in_pieces is False."),
        ({}, 7, "7 tokens at a time, so that no logits of all tokens are made."),
    ],
    ids=["LoRA on the head", "switched off", "in pieces"],
)
def test_the_log_says_which_of_the_two_it_is(pet, setting, expected, caplog):
    with caplog.at_level(logging.INFO, logger=logger.name):
        step = trained(llama(**pet), setting, steps=0).step
    (said,) = {record.getMessage() for record in caplog.records if record.getMessage().startswith("Head and loss")}
    assert said.endswith(expected)
    assert len(losses_of_labels(step)) == (setting == 7)
