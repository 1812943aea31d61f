"""The gradient apart from the optimizer: by finite differences, over several batches, on Qwen3."""

import numpy as np
import pytest
from mindspore import Tensor
from mindspore.common import dtype as mstype

from mindlora.training.model.log_probabilities import row_log_probabilities
from mindlora.training.model.loss_in_pieces import put_loss_in_pieces
from mindlora.training.preference.loss import reference_of
from mindlora.training.rl.policy_graphs import GivenGradients, PolicyGradients, PolicyLogProbabilities
from tests.support.mcore_networks import tiny_qwen3, with_adapters

ROWS, LENGTH = 3, 16


@pytest.fixture(scope="module")
def policy(library):
    """A Qwen3 whose head and loss are in pieces, as every run has them, its graphs, and some rows."""
    from tests.conftest import in_mode

    with in_mode(0):
        network = with_adapters(tiny_qwen3(), lora_rank=2, lora_alpha=4, lora_dropout=0.0, target_modules=".*qkv|.*fc2")
        rng = np.random.default_rng(0)
        for parameter in network.trainable_params():
            parameter.init_data()
            parameter.set_data(Tensor(rng.normal(0, 0.3, parameter.shape).astype(np.float32)))
        assert put_loss_in_pieces(network, True, True)
        rows = row_log_probabilities(network, "rl")
        rows.set_train(True)
        tokens = rng.integers(1, 64, (ROWS, LENGTH + 1)).astype(np.int32)
        labels = np.where(rng.random(tokens.shape) < 0.5, tokens, -100).astype(np.int32)
        coefficients = rng.normal(0, 1, (ROWS, LENGTH)).astype(np.float32)
        reference = PolicyLogProbabilities(reference_of(rows), is_reference=True)
        reference.set_train(True)
        yield (
            PolicyGradients(rows, tuple(network.trainable_params())),
            PolicyLogProbabilities(rows),
            reference,
            (tokens, labels, coefficients),
        )


def accumulated(gradients, *batches):
    """Returns the log-probabilities of batches, one after the other, and the gradients of all."""
    found = []
    for number, batch in enumerate(batches):
        found.append(gradients(*map(Tensor, batch), Tensor(float(number > 0), mstype.float32)).asnumpy())
    return np.concatenate(found), [gradient.asnumpy().copy() for gradient in gradients.gradients]


def test_gradients_are_those_of_the_weighted_sum(policy, graph_mode):
    gradients, forward, _, (tokens, labels, coefficients) = policy
    found, made = accumulated(gradients, (tokens, labels, coefficients))
    np.testing.assert_allclose(found, forward(Tensor(tokens), Tensor(labels)).asnumpy(), rtol=0, atol=2e-6)
    assert (found[labels[:, 1:] == -100] == 0).all() and (found[labels[:, 1:] != -100] < 0).all()
    rng = np.random.default_rng(1)
    for weight, gradient in zip(gradients.token_gradients.weights, made):
        direction = rng.normal(0, 1, weight.shape).astype(np.float32)
        before, sums = weight.asnumpy().copy(), []
        for step in (1e-2, -1e-2):
            weight.set_data(Tensor(before + step * direction))
            likely = forward(Tensor(tokens), Tensor(labels)).asnumpy().astype(np.float64)
            sums.append((likely * coefficients).sum())
        weight.set_data(Tensor(before))
        assert (gradient * direction).sum() == pytest.approx((sums[0] - sums[1]) / 2e-2, rel=2e-2, abs=2e-3)


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
