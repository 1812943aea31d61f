"""Several sequences in a row, each with the gradient that it has in a row of its own; gradients of any loss."""

import functools
from typing import NamedTuple

import numpy as np
import pytest
from mindspore import Parameter, Tensor
from mindspore.common import dtype as mstype

from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.training.model.cpu_cells import use_cpu_cells
from mindlora.training.model.log_probabilities import row_log_probabilities
from mindlora.training.model.loss_in_pieces import put_loss_in_pieces
from mindlora.training.model.pet import lora_model
from mindlora.training.preference.loss import reference_of
from mindlora.training.rl.policy_graphs import (
    GivenGradients,
    PolicyGradients,
    PolicyLogProbabilities,
    pack_rows,
    single_rows,
)
from mindlora.training.rl.policy_loss import policy_loss
from mindlora.training.rl.settings import rl_settings
from mindlora.training.step.packing import install_positions
from tests.conftest import in_mode
from tests.support.mcore_networks import tiny_qwen3, with_adapters
from tests.support.what_runs import shows

SIZE, LENGTH, PAD, IGNORED = 2, 40, 0, -100
LENGTHS = np.array([9, 21, 13, 12, 30, 7, 9])


def test_sequences_lie_where_first_fit_decreasing_puts_them():
    packed = pack_rows(LENGTHS, LENGTH)
    # 30 9 | 21 13 | 12 9 7, by hand.
    assert packed.rows.tolist() == [0, 1, 1, 2, 0, 2, 2] and packed.count == 3
    assert packed.begins.tolist() == [30, 0, 21, 0, 0, 21, 12]
    assert pack_rows(np.array([40, 40, 0]), LENGTH).rows.tolist() == [0, 1, 0]
    assert single_rows(LENGTHS, LENGTH).rows.tolist() == list(range(7))


def test_batches_have_every_token_once_at_its_position_and_results_find_their_way_back():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 99, (7, LENGTH + 1)).astype(np.int32)
    inside = np.arange(LENGTH) < LENGTHS[:, None]
    labels = np.full_like(tokens, IGNORED)
    labels[:, 1:][inside] = tokens[:, 1:][inside]
    coefficients = rng.normal(size=(7, LENGTH))
    packed = pack_rows(LENGTHS, LENGTH)
    batches = list(packed.batches(tokens, labels, coefficients, SIZE, IGNORED))
    assert [array.shape for array in batches[1]] == [(2, 40), (2, 41), (2, 41), (2, 40)] and len(batches) == 2
    positions, found_tokens, found_labels, found = (np.concatenate(arrays) for arrays in zip(*batches))
    for sequence, (row, begin, length) in enumerate(zip(packed.rows, packed.begins, LENGTHS)):
        places = slice(begin, begin + length)
        np.testing.assert_array_equal(positions[row, places], np.arange(length))
        np.testing.assert_array_equal(found_tokens[row, places], tokens[sequence, :length])
        np.testing.assert_array_equal(found_labels[row, 1:][places], labels[sequence, 1 : length + 1])
    assert (positions[0, 39:].tolist(), positions[1, 34:].tolist()) == ([0], list(range(6)))
    np.testing.assert_array_equal(positions[3], np.arange(LENGTH))
    assert (found_labels != IGNORED).sum() == LENGTHS.sum() and (found_labels[3] == IGNORED).all()
    np.testing.assert_allclose(packed.unpack(found), np.where(inside, coefficients, 0), rtol=1e-6)


class Made(NamedTuple):
    """The graphs of a network in which a row has several sequences, except ``forward``, in which a row is one."""

    gradients: PolicyGradients
    forward: PolicyLogProbabilities
    reference: PolicyLogProbabilities
    positions: Parameter
    rows: tuple


def graphs(network):
    """Made of a network."""
    rng = np.random.default_rng(1)
    for parameter in network.trainable_params():
        parameter.init_data()
        parameter.set_data(Tensor(rng.normal(0, 0.3, parameter.shape).astype(np.float32)))
    assert put_loss_in_pieces(network, True, True)
    policy = row_log_probabilities(network, "rl")
    policy.set_train(True)
    rows, forward = sequences(), PolicyLogProbabilities(policy)
    # Compiled before the network knows of positions, and before the graph whose gradient it must not take away.
    log_probabilities(forward, rows)
    positions = install_positions(network, SIZE)
    policy.set_train(True)
    reference = PolicyLogProbabilities(reference_of(policy), is_reference=True).set_train(True)
    return Made(PolicyGradients(policy, tuple(network.trainable_params())), forward, reference, positions, rows)


def log_probabilities(forward, rows):
    """Log-probabilities [sequences, N], each sequence in a row of its own."""
    packed = single_rows(LENGTHS, LENGTH)
    batches = packed.batches(*rows, SIZE, IGNORED)
    return packed.unpack(np.concatenate([forward(*map(Tensor, batch)).asnumpy() for _, *batch, _ in batches]))


def sequences():
    """Tokens that are no padding, labels of the second halves, and coefficients."""
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, 64, (7, LENGTH + 1)).astype(np.int32)
    places = np.arange(LENGTH)
    mask = (places >= LENGTHS[:, None] // 2) & (places < LENGTHS[:, None])
    labels = np.full_like(tokens, IGNORED)
    labels[:, 1:][mask] = tokens[:, 1:][mask]
    return tokens, labels, np.where(mask, rng.normal(size=mask.shape), 0)


def gradients_of(cell, positions, packed, rows):
    """Log-probabilities [sequences, N], and the gradient of all as one vector."""
    found = []
    for number, (at, *batch) in enumerate(packed.batches(*rows, SIZE, IGNORED)):
        if positions is not None:
            positions.set_data(Tensor(at))
        found.append(cell(*map(Tensor, batch), Tensor(float(number > 0), mstype.float32)).asnumpy())
    vector = np.concatenate([gradient.asnumpy().ravel() for gradient in cell.gradients]).astype(np.float64)
    return packed.unpack(np.concatenate(found)), vector


@pytest.fixture(scope="module")
def make(library, make_llama):
    """Returns a function that returns the Made of a model, and makes it once."""
    pet = {"lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.0}

    @functools.lru_cache(maxsize=None)
    def made(model):
        with in_mode(0):
            if model == "qwen3":
                return graphs(with_adapters(tiny_qwen3(seq_length=LENGTH), target_modules=".*qkv|.*fc2", **pet))
            base = make_llama(seq_length=LENGTH, num_layers=1)
            config = PetLoraConfig.from_pet_config({"pet_type": "lora", "target_modules": ".*wq|.*wk|.*w2", **pet})
            base.config.pet_config = config
            network = lora_model(config, base)
            use_cpu_cells(network)
            return graphs(network)

    return made


@pytest.fixture(params=["llama", "qwen3"])
def made(request, make):
    """The Made of each model."""
    return make(request.param)


def close(found, expected):
    """Whether two results agree within float32's rounding."""
    for one, other in zip(found, expected):
        assert np.linalg.norm(one - other) < 1e-6 * np.linalg.norm(other)


@shows("rl", "llama", "qwen3")
def test_packed_sequences_have_the_gradient_of_single_rows(made, graph_mode):
    cell, forward, _, positions, rows = made
    packed = gradients_of(cell, positions, pack_rows(LENGTHS, LENGTH), rows)
    np.testing.assert_allclose(packed[0], log_probabilities(forward, rows), rtol=0, atol=2e-6)
    close(gradients_of(cell, positions, single_rows(LENGTHS, LENGTH), rows), packed)
    assert np.abs(packed[1]).max() > 0.1
    # With the positions of one sequence, they see each other.
    positions.set_data(Tensor(np.tile(np.arange(LENGTH, dtype=np.int32), (SIZE, 1))))
    _, together = gradients_of(cell, None, pack_rows(LENGTHS, LENGTH), rows)
    assert np.linalg.norm(together - packed[1]) > 0.01 * np.linalg.norm(packed[1])


def test_gradients_are_those_of_the_weighted_sum(made, graph_mode):
    cell, forward, _, positions, rows = made
    found, _ = gradients_of(cell, positions, pack_rows(LENGTHS, LENGTH), rows)
    counted = rows[1][:, 1:] != IGNORED
    assert (found[~counted] == 0).all() and (found[counted] < 0).all()
    gradients = [gradient.asnumpy().copy() for gradient in cell.gradients]
    rng = np.random.default_rng(1)
    for weight, gradient in zip(cell.token_gradients.weights, gradients):
        direction = rng.normal(0, 1, weight.shape).astype(np.float32)
        before, sums = weight.asnumpy().copy(), []
        for step in (1e-2, -1e-2):
            weight.set_data(Tensor(before + step * direction))
            sums.append((log_probabilities(forward, rows) * rows[2]).sum())
        weight.set_data(Tensor(before))
        assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / 2e-2, rel=2e-2, abs=2e-3)


@pytest.mark.parametrize("keys", [{"loss_type": kind} for kind in ("dapo", "grpo", "dr_grpo", "bnpo")])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_all_losses_have_the_same_gradient_packed_and_single_even_of_padding(made, graph_mode, keys, level):
    cell, _, _, positions, (tokens, labels, _) = made
    tokens = np.where(np.arange(LENGTH + 1) % 5 == 3, PAD, tokens)
    labels = np.where(labels == IGNORED, labels, tokens)
    settings = rl_settings({"reward_funcs": "exact_answer", "beta": 0.1, "importance_sampling_level": level, **keys})
    rng = np.random.default_rng(3)
    mask = labels[:, 1:] != IGNORED
    policy, old, reference = (np.log(rng.uniform(0.3, 0.5, mask.shape)) for _ in range(3))
    coefficients = policy_loss(policy, old, reference, rng.normal(size=7), mask, settings).coefficients
    rows = tokens, labels, coefficients
    single = gradients_of(cell, positions, single_rows(LENGTHS, LENGTH), rows)
    close(gradients_of(cell, positions, pack_rows(LENGTHS, LENGTH), rows), single)


# The gradient apart from the optimizer: over several batches, and of a reference, on Qwen3


@pytest.fixture
def policy(make):
    """The graphs of a Qwen3 whose head and loss are in pieces, as every run has them, and some rows of one sequence."""
    made = make("qwen3")
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (SIZE, 1))
    made.positions.set_data(Tensor(positions))
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 64, (SIZE, LENGTH + 1)).astype(np.int32)
    labels = np.where(rng.random(tokens.shape) < 0.5, tokens, IGNORED).astype(np.int32)
    coefficients = rng.normal(0, 1, (SIZE, LENGTH)).astype(np.float32)
    return made.gradients, made.forward, made.reference, (tokens, labels, coefficients)


def accumulated(gradients, *batches):
    """Returns the log-probabilities of batches, one after the other, and the gradients of all."""
    found = []
    for number, batch in enumerate(batches):
        found.append(gradients(*map(Tensor, batch), Tensor(float(number > 0), mstype.float32)).asnumpy())
    return np.concatenate(found), [gradient.asnumpy().copy() for gradient in gradients.gradients]


def test_batches_add_up_and_a_new_step_begins_anew(policy, graph_mode):
    gradients, _, _, (tokens, labels, coefficients) = policy
    nothing = (tokens, labels, np.zeros_like(coefficients))
    _, once = accumulated(gradients, (tokens, labels, coefficients))
    halves = [(tokens, labels, coefficients * share) for share in (0.25, 0.75)]
    _, parts = accumulated(gradients, *halves, nothing)
    assert max(np.abs(gradient).max() for gradient in once) > 0.1
    for one, other in zip(once, parts):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)
    # What was not finite is gone with the next step.
    gradients.gradients[0].set_data(Tensor(np.full(gradients.gradients[0].shape, np.nan, np.float32)))
    _, again = accumulated(gradients, (tokens, labels, coefficients))
    np.testing.assert_array_equal(again[0], once[0])


def test_the_reference_stays_what_the_policy_was(policy, graph_mode):
    gradients, forward, reference, (tokens, labels, coefficients) = policy
    before = forward(Tensor(tokens), Tensor(labels)).asnumpy()
    np.testing.assert_allclose(reference(Tensor(tokens), Tensor(labels)).asnumpy(), before, rtol=0, atol=2e-6)
    weight = gradients.token_gradients.weights[1]
    kept = weight.asnumpy().copy()
    weight.set_data(Tensor(kept + 1))
    np.testing.assert_allclose(reference(Tensor(tokens), Tensor(labels)).asnumpy(), before, rtol=0, atol=2e-6)
    assert np.abs(forward(Tensor(tokens), Tensor(labels)).asnumpy() - before).max() > 0.01
    # Compiling the reference has not taken the policy's gradient away.
    weight.set_data(Tensor(kept))
    assert np.abs(accumulated(gradients, (tokens, labels, coefficients))[1][0]).max() > 0


def test_given_gradients_are_scaled_as_a_train_step_asks(policy, graph_mode):
    gradients, _, _, rows = policy
    _, made = accumulated(gradients, rows)
    total, count, scaled = GivenGradients(gradients.gradients)(
        Tensor(4.0, mstype.float32), Tensor(1.5, mstype.float32), Tensor(7.0, mstype.float32)
    )
    assert (float(total.asnumpy()), count.asnumpy().tolist()) == (1.5, [7.0])
    for one, other in zip(made, scaled):
        np.testing.assert_array_equal(4 * one, other.asnumpy())
