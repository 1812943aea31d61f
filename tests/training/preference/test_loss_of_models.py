"""The reference of preference training on MindFormers' Llama, and what the train step makes of a batch."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.core.errors import ConfigError
from mindlora.models.names import TRANSIENT
from mindlora.network.repeated_layers import compile_layers_once, mark_reference
from mindlora.training.model.loss_in_pieces import put_loss_in_pieces
from mindlora.training.preference.loss import preference_loss
from mindlora.training.preference.reference import reference_network
from mindlora.training.preference.settings import preference_settings
from mindlora.training.step.train_step import LoraTrainOneStepCell
from tests.support import preference_oracle
from tests.support.mcore_networks import MAKE, scaled, tiny_qwen3, tiny_qwen3_moe, with_adapters
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.what_runs import shows

WIDTH = 17


def adapted(make_llama, random=False, **config):
    network = make_llama(num_layers=1)
    apply_lora(network, LoraConfig(lora_rank=4, **{"target_modules": ".*wq|.*w2", **config}))
    freeze_base(network)
    if random:
        set_random(network)
    return network


def set_random(network):
    rng = np.random.default_rng(5)
    for parameter in network.trainable_params():
        parameter.set_data(Tensor(rng.normal(0, 0.2, parameter.shape).astype(np.float32)))


def tokens(rows=2):
    return np.random.default_rng(0).integers(4, 64, (rows, WIDTH)).astype(np.int32)


def logits(network):
    network.set_train(False)
    return network(Tensor(tokens()[:, :-1]))[0].asnumpy()


def test_the_reference_of_a_new_adapter_is_the_base_itself(make_llama, pynative_mode):
    network = adapted(make_llama)
    base = logits(network)
    reference = reference_network(network)
    own = {id(parameter) for parameter in network.get_parameters()}
    assert all(id(parameter) in own for parameter in reference.get_parameters())
    assert not any("lora" in parameter.name for parameter in reference.get_parameters())
    set_random(network)
    np.testing.assert_allclose(logits(reference), base, rtol=0, atol=1e-6)
    assert np.abs(logits(network) - base).max() > 0.01


def test_the_reference_of_a_loaded_adapter_is_that_adapter(make_llama, pynative_mode):
    network = adapted(make_llama, random=True)
    before = logits(network)
    reference = reference_network(network)
    copies = [parameter for parameter in reference.get_parameters() if parameter.name.startswith(TRANSIENT)]
    assert len(copies) == len(network.trainable_params()) and not any(copy.requires_grad for copy in copies)
    for parameter in network.trainable_params():
        parameter.set_data(parameter * 0)
    np.testing.assert_array_equal(logits(reference), before)
    assert np.abs(logits(network) - before).max() > 0.01


@pytest.mark.parametrize("random", [False, True], ids=["new", "loaded"])
def test_lora_on_the_head_in_pieces_has_the_losses_of_all_logits(random, make_llama, pynative_mode):
    ids = tokens()[None]
    answers = np.where(np.arange(WIDTH) < 4, -1, np.arange(2)[:, None])[None].astype(np.int32)
    batch = [Tensor(array) for array in (ids, np.where(answers >= 0, ids, -100).astype(np.int32), answers)]
    losses = []
    for setting in (False, 5):
        network = adapted(make_llama, random, target_modules=".*lm_head")
        rng = np.random.default_rng(6)
        for parameter in network.get_parameters():
            if parameter.shape[1:] and not parameter.name.endswith("lora_b"):
                parameter.set_data(Tensor(rng.normal(0, 0.2, parameter.shape).astype(np.float32)))
        assert put_loss_in_pieces(network, setting, steps_by_mindlora=True) == bool(setting)
        loss = preference_loss(network, preference_settings({"loss": "dpo"}))
        for parameter in network.trainable_params():
            parameter.set_data(Tensor(parameter.asnumpy() + rng.normal(0, 0.2, parameter.shape).astype(np.float32)))
        for is_training in (True, False):
            loss.set_train(is_training)
            losses.append(float(loss(*batch, Tensor(np.ones((1, 1), np.int32)))[0].asnumpy()))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    assert abs(losses[0] - np.log(2)) > 1e-3


def test_an_adapter_that_is_made_from_the_base_has_no_reference_yet(make_llama, pynative_mode):
    network = adapted(make_llama, lora_init="pissa")
    with pytest.raises(ConfigError, match="takes its part out of the base when training begins"):
        reference_network(network)


@pytest.mark.parametrize("random", [False, True], ids=["new", "loaded"])
def test_the_reference_of_adapters_on_experts_computes_what_the_model_did(random, mindformers):
    """A Morph would run the cell that was copied."""
    base = tiny_qwen3_moe(seq_length=WIDTH - 1)
    targets = {"target_modules": ["linear_proj"], "target_parameters": ["mlp.experts"]}
    network = with_adapters(base, lora_rank=2, lora_alpha=4, **targets)
    if random:
        set_random(network)
    with mcore_in_pynative():
        before = logits(network)
        reference = reference_network(network)
        for parameter in network.trainable_params():
            parameter.set_data(Tensor(np.full(parameter.shape, 0.3, np.float32)))
        np.testing.assert_allclose(logits(reference), before, rtol=0, atol=1e-5)
        assert np.abs(logits(network) - before).max() > 0.01


def log_probabilities(network, ids, answers):
    """The log-probability of each of two answers, float64 [2], from the logits of a network: ids is [2, WIDTH]."""
    network.set_train(False)
    found = network(Tensor(ids[:, :-1]))
    found = (found[0] if isinstance(found, tuple) else found).asnumpy().astype(np.float64).reshape(2, WIDTH - 1, -1)
    found = found - np.log(np.exp(found).sum(-1, keepdims=True))
    chosen = np.take_along_axis(found, ids[:, 1:, None], -1)[..., 0]
    return np.where(answers[:, 1:] >= 0, chosen, 0).sum(-1)


@pytest.mark.long
@shows("preference", "deepseek_v3")
def test_losses_on_routed_experts_are_those_of_the_logits_in_graph_mode(mindformers, graph_mode):
    """Before a release alone: a Qwen3-MoE learns preferences in a graph in tests/e2e."""
    loss, batch, expected = loss_on_experts("deepseek_v3", "dpo")
    assert float(loss.set_train()(*batch)[0].asnumpy()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "model, name", [("deepseek_v3", "dpo"), ("deepseek_v3", "orpo"), ("qwen3_moe", "dpo"), ("qwen3_moe", "orpo")]
)
def test_losses_on_routed_experts_are_those_of_the_logits(model, name, mindformers):
    loss, batch, expected = loss_on_experts(model, name)
    with mcore_in_pynative():
        for is_training in (True, False):
            found = float(loss.set_train(is_training)(*batch)[0].asnumpy())
            assert found == pytest.approx(expected, rel=1e-5)


def loss_on_experts(model, name):
    """The cell of a loss, a batch of a pair, and what NumPy makes of the logits: the policy's, and a reference's."""
    ids = tokens()
    answers = np.where(np.arange(WIDTH) < np.array([[6], [9]]), -1, np.array([[0], [1]])).astype(np.int32)
    labels = np.where(answers >= 0, ids, -100).astype(np.int32)
    targets = {"target_modules": ["linear_proj"], "target_parameters": ["mlp.experts"]}

    def make():
        return scaled(MAKE[model](seq_length=WIDTH - 1), 0.4)

    base, adapted_base = make(), make()
    apply_lora(adapted_base, LoraConfig(lora_rank=2, lora_alpha=4, **targets))
    freeze_base(adapted_base)
    set_random(adapted_base)
    with mcore_in_pynative():
        policy, reference = (log_probabilities(each, ids, answers) for each in (adapted_base, base))
    assert np.abs(policy - reference).min() > 0.01
    settings = preference_settings({"loss": "dpo", "beta": 0.3} if name == "dpo" else {"loss": name})
    network = with_adapters(make(), lora_rank=2, lora_alpha=4, **targets)
    loss = preference_loss(network, settings)
    set_random(network)
    batch = [Tensor(array) for array in (ids[None], labels[None], answers[None], np.ones((1, 1), np.int32))]
    lengths, compared = (answers[:, 1:] >= 0).sum(-1), reference if name == "dpo" else None
    return loss, batch, preference_oracle.pair_loss(settings, policy, compared, lengths)


def test_a_packed_pair_has_the_loss_that_it_has_in_two_rows_of_an_mcore_model(mindformers):
    begin, length = 1, 12
    answers = np.random.default_rng(0).integers(4, 64, (2, length)).astype(np.int32)
    answers[:, :4] = answers[0, :4]
    answers[:, 0] = begin
    single = np.zeros((2, WIDTH + 16), np.int32)
    single[:, :length] = answers
    packed = np.zeros((1, WIDTH + 16), np.int32)
    packed[0, : 2 * length] = answers.reshape(-1)
    numbers = np.where(np.arange(length) < 4, -1, np.arange(2)[:, None]).astype(np.int32)
    losses = []
    for ids in (single, packed):
        rows = np.full_like(ids, -1)
        rows[ids > 0] = numbers.reshape(-1)
        labels = np.where(rows >= 0, ids, -100).astype(np.int32)
        base = scaled(tiny_qwen3(seq_length=WIDTH + 15), 0.4)
        network = with_adapters(base, lora_rank=2, lora_alpha=4, target_modules=["linear_proj"])
        step = LoraTrainOneStepCell(
            network,
            nn.Adam(network.trainable_params(), 1e-2),
            preference={"loss": "dpo"},
            packed_boundary=begin if len(ids) == 1 else None,
        )
        set_random(network)
        step.set_train()
        batch = [Tensor(array[None] if len(ids) == 2 else array) for array in (ids, labels, rows)]
        batch.append(Tensor(np.ones((1, 1), np.int32)))
        # What the step differentiates.
        with mcore_in_pynative():
            losses.append(float(step.token_gradients.network(*batch)[0].asnumpy()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and abs(losses[0] - np.log(2)) > 1e-3


def test_an_mcore_model_that_predicts_several_tokens_is_refused():
    class Several(nn.Cell):
        mtp_process, calculate_per_token_loss, loss = True, False, None

    with pytest.raises(ConfigError, match="num_nextn_predict_layers: 0"):
        preference_loss(Several(), preference_settings({"loss": "reward"}))


def test_a_model_without_a_loss_over_tokens_is_refused():
    class Other(nn.Cell):
        config = None

    with pytest.raises(ConfigError, match="Other does not give them"):
        preference_loss(Other(), preference_settings({}))


def test_layers_of_the_reference_compile_apart(make_llama, graph_mode):
    network = adapted(make_llama)
    compile_layers_once(network)
    reference = reference_network(network)
    mark_reference(reference)
    marks = [[cell.cell_init_args for cell in side.model.layers] for side in (network, reference)]
    assert not set(marks[0]) & set(marks[1])


def test_a_step_in_graph_mode(make_llama, graph_mode):
    """The step of marked and recomputed layers, in two micro-batches, begins at log 2 and lowers the loss."""
    network = adapted(make_llama)
    for layer in network.model.layers:
        layer.recompute()
    compile_layers_once(network)
    step = LoraTrainOneStepCell(
        network, nn.Adam(network.trainable_params(), 1e-2), micro_batches=2, preference={"loss": "dpo"}
    )
    step.set_train()
    ids = np.random.default_rng(0).integers(4, 64, (4, 2, WIDTH)).astype(np.int32)
    answers = np.full(ids.shape, -1, np.int32)
    answers[:, 0, 6:12], answers[:, 1, 6:9] = 0, 1
    labels = np.where(answers >= 0, ids, -100).astype(np.int32)
    batch = [Tensor(array) for array in (ids, labels, answers, np.ones((4, 1), np.int32))]
    losses = [float(step(*batch)[0].asnumpy()) for _ in range(3)]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-6) and losses[2] < losses[1] < losses[0]
    record = step.last_record()
    assert record.tokens == 4 * 9 and record.measures["tokens_chosen"] == 6
    assert record.measures["reward_margin"] > 0 and record.measures["reward_accuracy"] == 1
    assert ms.get_context("mode") == ms.GRAPH_MODE
    # What guards set: a step above the limit changes nothing.
    step.set_limits(0.01, np.inf)
    before = [parameter.asnumpy() for parameter in network.trainable_params()]
    step(*batch)
    assert step.last_record().skipped
    for parameter, value in zip(network.trainable_params(), before):
        np.testing.assert_array_equal(parameter.asnumpy(), value)
