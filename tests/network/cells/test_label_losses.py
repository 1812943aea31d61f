"""LabelLosses and AdaptedLabelLosses against NumPy in float64: values, gradients, tokens and labels at the edges."""

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindlora.core.errors import ConfigError
from mindlora.models.label_losses import check_loss_in_pieces, tokens_at_once
from mindlora.network.cells.label_losses import AdaptedLabelLosses, LabelLosses
from tests.support.backward import backward_gradients

CHANNELS, VOCABULARY, PIECE, RANK = 5, 11, 4, 2
# MindSpore's exponentials on a CPU are off by up to 1e-5 of their values.


class Network(nn.Cell):
    """The sum of the losses, each times its factor, of hidden states and a head that are parameters."""

    def __init__(self, tokens, trained=True, piece=PIECE, dtype=ms.float32):
        super().__init__()
        self.hidden = Parameter(Tensor(np.zeros((tokens, CHANNELS)), dtype), name="hidden")
        self.weight = Parameter(Tensor(np.zeros((VOCABULARY, CHANNELS)), dtype), name="weight", requires_grad=trained)
        self.losses = LabelLosses(dtype, trained, piece)

    def construct(self, labels, factors):
        losses = self.losses(self.hidden, self.weight, labels)
        return (losses * factors).sum(), losses


class Gradients(nn.Cell):
    """(losses, gradients) of a Network."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network
        self.both = ops.value_and_grad(network, None, ParameterTuple(network.trainable_params()), has_aux=True)

    def construct(self, labels, factors):
        (_, losses), gradients = self.both(labels, factors)
        return losses, gradients


@functools.lru_cache(maxsize=None)
def gradients_of(mode, tokens, trained, piece, dtype):
    """Gradients in a mode, compiled once."""
    return Gradients(Network(tokens, trained, piece, dtype)).set_train()


def oracle(hidden, weight, labels, factors):
    """Losses, and the gradients of their weighted sum with respect to hidden and weight."""
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    logits = hidden @ weight.T
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counted = (labels >= 0) & (labels < weight.shape[0])
    rows, safe = np.arange(len(labels)), np.where(counted, labels, 0)
    gradient = np.exp(log_p)
    gradient[rows, safe] -= 1
    gradient *= (factors * counted)[:, None]
    return np.where(counted, -log_p[rows, safe], 0), gradient @ weight, gradient.T @ hidden


def sample(tokens, seed=0):
    rng = np.random.default_rng(seed)
    hidden, weight = rng.normal(size=(tokens, CHANNELS)), rng.normal(size=(VOCABULARY, CHANNELS))
    labels = rng.integers(0, VOCABULARY, tokens)
    return hidden.astype(np.float32), weight.astype(np.float32), labels.astype(np.int32), rng.random(tokens)


def compared(hidden, weight, labels, factors, rtol=5e-6, trained=True, piece=PIECE, dtype=ms.float32):
    """Asserts that losses and gradients are those of the oracle, and returns them."""
    step = gradients_of(ms.get_context("mode"), len(labels), trained, piece, dtype)
    step.network.hidden.set_data(Tensor(hidden, dtype))
    step.network.weight.set_data(Tensor(weight, dtype))
    losses, gradients = step(Tensor(labels), Tensor(factors, ms.float32))
    found = [losses.asnumpy(), *(gradient.float().asnumpy() for gradient in gradients)]
    for array, expected in zip(found, oracle(hidden, weight, labels, factors)):
        np.testing.assert_allclose(array, expected, rtol=0, atol=rtol * max(np.abs(expected).max(), 1e-3))
    return found


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_losses_and_gradients(mode, trained):
    # Pieces of 4, 4 and 1 tokens, among them the last entry of the vocabulary, and labels that are none.
    hidden, weight, labels, factors = sample(9)
    labels[[0, 5]], labels[[2, 8]], labels[6] = VOCABULARY - 1, -100, VOCABULARY
    found = compared(hidden, weight, labels, factors, trained=trained)
    assert len(found) == 2 + trained
    ignored = [2, 6, 8]
    assert not found[0][ignored].any() and not found[1][ignored].any()


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_backward_gives_the_gradients(pynative_mode, trained):
    hidden, weight, labels, factors = sample(9)
    labels[2] = -100
    inputs = [Parameter(Tensor(hidden), name="hidden"), Parameter(Tensor(weight), name="weight", requires_grad=trained)]
    losses = LabelLosses(ms.float32, trained, PIECE).set_train()
    found = backward_gradients(lambda *both: losses(*both, Tensor(labels)), inputs, Tensor(factors, ms.float32))
    _, of_hidden, of_weight = oracle(hidden, weight, labels, factors)
    np.testing.assert_allclose(found[0], of_hidden, rtol=0, atol=5e-6 * np.abs(of_hidden).max())
    if trained:
        np.testing.assert_allclose(found[1], of_weight, rtol=0, atol=5e-6 * np.abs(of_weight).max())
    else:
        assert found[1] is None


@pytest.mark.parametrize("tokens, piece", [(1, PIECE), (3, 1), (9, None)])
def test_numbers_of_tokens(graph_mode, tokens, piece):
    compared(*sample(tokens), piece=piece)


class Adapted(nn.Cell):
    """As Network, of a head with an adapter, whose low-rank product is a parameter too."""

    def __init__(self, arrays):
        super().__init__()
        self.hidden, self.low_rank, self.weight, self.b = (
            Parameter(Tensor(array), name=name, requires_grad=name != "weight") for name, array in arrays.items()
        )
        self.losses = AdaptedLabelLosses(ms.float32, PIECE)

    def construct(self, labels, factors):
        losses = self.losses(self.hidden, self.low_rank, self.weight, self.b, labels)
        return (losses * factors).sum(), losses


@pytest.mark.parametrize("mode_of_test", ["graph", "pynative", "backward"])
def test_a_head_with_an_adapter(mode_of_test, request):
    request.getfixturevalue("graph_mode" if mode_of_test == "graph" else "pynative_mode")
    hidden, weight, labels, factors = sample(9)
    labels[[2, 6]] = -100, VOCABULARY
    rng = np.random.default_rng(3)
    low_rank, b = (rng.normal(size=(rows, RANK)).astype(np.float32) for rows in (9, VOCABULARY))
    # The logits of one wider head, whose gradients are those of both.
    wide = np.concatenate([hidden, low_rank], 1), np.concatenate([weight, b], 1)
    losses, of_inputs, of_weights = oracle(*wide, labels, factors)
    expected = [losses, of_inputs[:, :CHANNELS], of_inputs[:, CHANNELS:], of_weights[:, CHANNELS:]]

    network = Adapted({"hidden": hidden, "low_rank": low_rank, "weight": weight, "b": b}).set_train()
    labels, factors = Tensor(labels), Tensor(factors, ms.float32)
    if mode_of_test == "backward":
        inputs = [network.hidden, network.low_rank, network.weight, network.b]
        of_hidden, of_low_rank, of_weight, of_b = backward_gradients(
            lambda *all_of_them: network.losses(*all_of_them, labels), inputs, factors
        )
        assert of_weight is None
        found = [network(labels, factors)[1].asnumpy(), of_hidden, of_low_rank, of_b]
    else:
        losses, gradients = Gradients(network)(labels, factors)
        found = [losses.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]
    for array, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, right, rtol=0, atol=5e-6 * np.abs(right).max())
    network.set_train(False)
    np.testing.assert_allclose(network(labels, factors)[1].asnumpy(), expected[0], rtol=5e-6)


def test_no_label_counts(graph_mode):
    hidden, weight, labels, factors = sample(9)
    found = compared(hidden, weight, np.full_like(labels, -100), factors)
    assert not any(array.any() for array in found)


def test_huge_logits(graph_mode):
    hidden, weight, labels, factors = sample(9)
    found = compared(hidden * 1e4, weight, labels, factors, trained=False)
    assert found[0].max() > 1e4


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_16_bits(graph_mode, trained):
    hidden, weight, labels, factors = sample(9)
    hidden, weight = hidden.astype(np.float16), weight.astype(np.float16)
    compared(hidden, weight, labels, factors, rtol=2e-3, trained=trained, dtype=ms.float16)


def test_evaluation_computes_the_same(graph_mode):
    hidden, weight, labels, factors = sample(9)
    network = Network(9).set_train(False)
    network.hidden.set_data(Tensor(hidden))
    network.weight.set_data(Tensor(weight))
    _, losses = network(Tensor(labels), Tensor(factors, ms.float32))
    np.testing.assert_allclose(losses.asnumpy(), oracle(hidden, weight, labels, factors)[0], rtol=5e-6)


def test_finite_differences(graph_mode):
    hidden, weight, labels, factors = sample(9)
    _, of_hidden, of_weight = compared(hidden, weight, labels, factors)

    def total(hidden, weight):
        return (oracle(hidden, weight, labels, factors)[0] * factors).sum()

    rng, step = np.random.default_rng(1), 1e-5
    along = [rng.normal(size=array.shape) for array in (hidden, weight)]
    there, back = ([array + sign * step * way for array, way in zip((hidden, weight), along)] for sign in (1, -1))
    slope = (total(*there) - total(*back)) / (2 * step)
    assert (of_hidden * along[0]).sum() + (of_weight * along[1]).sum() == pytest.approx(slope, rel=1e-5)


def test_size_of_pieces():
    # Llama 3 8B, 4 x 2048 tokens; Qwen3 0.6B; a small vocabulary; a large one on a short row.
    assert tokens_at_once(8192, 4096, 128256) == 512
    assert tokens_at_once(8192, 1024, 151936) == 256
    assert tokens_at_once(1024, 512, 32000) == 128
    assert tokens_at_once(64, 64, 1_000_000) == 128


@pytest.mark.parametrize("setting", [0, -1, 1.5, "many", None])
def test_settings_out_of_range(setting):
    with pytest.raises(ConfigError, match="loss_in_pieces"):
        check_loss_in_pieces(setting)
