"""The cells that mcore models get on a CPU: outputs and gradients of each, in graph mode and in PyNative."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from tests.support.mcore_networks import TINY, Loss, tiny_qwen3, with_adapters
from tests.support.networks import assert_close, normal
from tests.support.saved_tensors import compiled_graph, saved_tensors

SIZES = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 6,
    "hidden_size": 24,
    "num_layers": 1,
    "seq_length": 5,
    "compute_dtype": "float32",
    "params_dtype": "float32",
    "attention_dropout": 0.0,
}
TOKENS, BATCH, HEADS, SIZE = 5, 2, 4, 6


@pytest.fixture
def config(mindformers):
    from mindformers.parallel_core.training_graph.device_matrix import layout
    from mindformers.parallel_core.transformer_config import TransformerConfig

    found = TransformerConfig(**SIZES)
    layout.init_layout(found)
    return found


def for_a_cpu(cell):
    """Returns a cell of MindFormers' as mindlora has it on a CPU."""
    from mindlora.training.model.mcore_cpu_cells import use_mcore_cpu_cells

    use_mcore_cpu_cells(cell)
    return cell


class Weighted(nn.Cell):
    """sum(cell(...) * weights)."""

    def __init__(self, cell, weights):
        super().__init__(auto_prefix=False)
        self.cell, self.weights = cell, Tensor(weights)

    def construct(self, *inputs):
        return (self.cell(*inputs) * self.weights).sum()


def gradients(cell, weights, *inputs):
    """Returns the gradients of sum(cell(...) * weights) with respect to the inputs."""
    found = ms.grad(Weighted(cell, weights), tuple(range(len(inputs))))(*map(Tensor, inputs))
    return found if isinstance(found, tuple) else (found,)


def slopes(function, weights, *inputs, step=1e-5):
    """Returns the same gradients of a function on NumPy arrays, by differences in float64."""
    inputs = [np.asarray(array, np.float64) for array in inputs]
    found = []
    for array in inputs:
        slope = np.zeros_like(array)
        for place in np.ndindex(*array.shape):
            kept = array[place]
            sides = []
            for moved in (kept + step, kept - step):
                array[place] = moved
                sides.append((function(*inputs) * weights).sum())
            array[place] = kept
            slope[place] = (sides[0] - sides[1]) / (2 * step)
        found.append(slope)
    return found


def assert_gradients(cell, function, weights, *inputs):
    computed = gradients(cell, weights, *inputs)
    assert len(computed) == len(inputs)
    for found, expected in zip(computed, slopes(function, weights, *inputs)):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found.asnumpy(), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_a_norm_divides_by_the_root_mean_square(config, mode, library):
    from mindformers.parallel_core.training_graph.transformer.norm import FusedRMSNorm

    cell = for_a_cpu(FusedRMSNorm(config, SIZE, eps=0.1))
    assert type(cell).__name__ == "CpuFusedRMSNorm"
    weight = normal(SIZE, seed=1)
    cell.weight.set_data(Tensor(weight))

    def norm(x):
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 0.1) * weight

    x = normal(TOKENS, BATCH, HEADS, SIZE)
    assert_close(cell(Tensor(x)), norm(x))
    assert_gradients(cell, norm, normal(*x.shape, seed=2), x)


def attention(mask, scale):
    """Returns attention on NumPy arrays [tokens, batch, heads, size], where the mask is 0."""

    def attend(query, key, value):
        key, value = (np.repeat(array, query.shape[2] // array.shape[2], 2) for array in (key, value))
        scores = np.einsum("sbnd,tbnd->bnst", query, key) * scale
        scores = np.where(mask == 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        context = np.einsum("bnst,tbnd->sbnd", weights, value)
        return context.reshape((*context.shape[:2], -1))

    return attend


@pytest.mark.parametrize("batch, value_size", [(BATCH, SIZE), (1, SIZE), (BATCH, 4)])
def test_attention_sees_what_the_mask_lets_it(config, mode, library, batch, value_size):
    """In DeepSeek-V3 heads of values are smaller than those of keys."""
    from mindformers.parallel_core.training_graph.transformer.flash_attention import FlashAttention

    cell = for_a_cpu(FlashAttention(config, 1, softmax_scale=0.7))
    assert type(cell).__name__ == "CpuFlashAttention"
    mask = np.triu(np.ones((batch, 1, TOKENS, TOKENS), np.uint8), 1)
    mask[-1, :, 2:, 1] = 1
    query, key = normal(TOKENS, batch, HEADS, SIZE), normal(TOKENS, batch, 2, SIZE, seed=1)
    value = normal(TOKENS, batch, 2, value_size, seed=2)
    attend = attention(mask, 0.7)
    assert_close(cell(*map(Tensor, (query, key, value, mask))), attend(query, key, value))
    weights = normal(TOKENS, batch, HEADS * value_size, seed=3)
    assert_gradients(Masked(cell, mask), attend, weights, query, key, value)


class Masked(nn.Cell):
    """An attention of one mask."""

    def __init__(self, cell, mask):
        super().__init__(auto_prefix=False)
        self.cell, self.mask = cell, Tensor(mask)

    def construct(self, query, key, value):
        return self.cell(query, key, value, self.mask)


class Turned(nn.Cell):
    """Heads that turn by the angles of a rotary embedding."""

    def __init__(self, rotary, angles, scale):
        super().__init__(auto_prefix=False)
        self.rotary, self.angles, self.scale = rotary, Tensor(angles), scale

    def construct(self, x):
        return self.rotary(x, (self.angles, self.scale))


@pytest.mark.parametrize("turning", [SIZE, 4])
def test_heads_turn_as_mindformers_turns_them(config, mode, library, turning):
    """Whole heads by mindlora's operator; those that turn in part by MindFormers' cell."""
    from mindformers.parallel_core.training_graph.base_models.common.embeddings.rope_utils import ApplyRotaryPosEmb

    from mindlora.training.model.mcore_cpu_cells import CpuRotary

    plain = ApplyRotaryPosEmb(config)
    angles = np.tile(normal(TOKENS, 1, 1, turning // 2, seed=4), 2)
    ours, theirs = Turned(CpuRotary(plain), angles, 1.5), Turned(plain, angles, 1.5)
    x, weights = normal(TOKENS, BATCH, HEADS, SIZE), normal(TOKENS, BATCH, HEADS, SIZE, seed=5)
    assert_close(ours(Tensor(x)), theirs(Tensor(x)).asnumpy())
    assert_close(gradients(ours, weights, x)[0], gradients(theirs, weights, x)[0].asnumpy())


class Sent(nn.Cell):
    """What a dispatcher gives to the experts, and what comes back if expert e multiplies by e + 1."""

    def __init__(self, dispatcher, probs, chosen):
        super().__init__(auto_prefix=False)
        self.dispatcher, self.probs, self.chosen = dispatcher, Tensor(probs), Tensor(chosen)

    def construct(self, tokens):
        rows, groups, context = self.dispatcher.token_permutation(tokens, self.probs, self.chosen)
        numbers = ops.cast(ops.arange(rows.shape[0]).expand_dims(1) >= groups.expand_dims(0), ms.float32).sum(1)
        return self.dispatcher.token_unpermutation(rows * (numbers + 1).expand_dims(1), context), rows, groups


class Returned(Sent):
    """What comes back alone."""

    def construct(self, tokens):
        return super().construct(tokens)[0]


def test_tokens_go_to_their_experts_and_come_back(mode, mindformers):
    from mindlora.training.model.mcore_cpu_cells import Dispatcher

    tokens, probs = normal(1, TOKENS, 3), normal(1, TOKENS, 2, seed=6)
    # No token chooses expert 1.
    chosen = np.array([[[3, 0], [2, 3], [0, 2], [2, 0], [3, 2]]], np.int32)

    def back(x):
        return np.einsum("btk,btk,btd->btd", probs, chosen + 1.0, x)

    found, rows, groups = Sent(Dispatcher(4), probs, chosen)(Tensor(tokens))
    assert groups.asnumpy().tolist() == [3, 3, 7, 10]
    order = np.argsort(chosen.ravel(), kind="stable") // 2
    assert np.array_equal(rows.asnumpy(), tokens[0, order])
    assert_close(found, back(tokens))
    assert_gradients(Returned(Dispatcher(4), probs, chosen), back, normal(1, TOKENS, 3, seed=7), tokens)


def test_gate_and_up_are_the_halves_of_an_axis(mode, mindformers):
    from mindlora.training.model.mcore_cpu_cells import Swiglu

    def swiglu(x):
        gate, up = np.split(x, 2, -1)
        return gate / (1 + np.exp(-gate)) * up

    x = normal(TOKENS, 6)
    assert_close(Swiglu()(Tensor(x), -1), swiglu(x))
    assert_gradients(Swiglu(), swiglu, normal(TOKENS, 3, seed=1), x)


def test_pieces_and_outer_products_and_the_largest(mode, mindformers):
    from mindlora.training.model.mcore_cpu_cells import Outer, Pieces, TopK

    x = normal(2, 6)
    assert [piece.asnumpy().tolist() for piece in Pieces()(Tensor(x), (1, 3, 2), -1)] == [
        x[:, begin:end].tolist() for begin, end in ((0, 1), (1, 4), (4, 6))
    ]
    assert_close(Outer()(Tensor(x[0]), Tensor(x[1])), np.outer(x[0], x[1]))
    values, places = TopK()(Tensor(x), 2)
    order = np.argsort(-x, 1)[:, :2]
    assert np.array_equal(places.asnumpy(), order)
    assert np.array_equal(values.asnumpy(), np.take_along_axis(x, order, 1))


@pytest.mark.parametrize("hidden_act", ["silu", "swiglu", "fusedswiglu"])
def test_a_feed_forward_network_keeps_no_silu(hidden_act, mindformers, graph_mode, library, tmp_path, monkeypatch):
    sizes = {"hidden_act": hidden_act.removeprefix("fused"), "bias_swiglu_fusion": hidden_act == "fusedswiglu"}
    network = with_adapters(tiny_qwen3(**sizes), lora_rank=4, lora_alpha=8, target_modules=".*linear_fc.*")
    tokens = Tensor(np.ones((2, TINY["seq_length"]), np.int32))
    kept = saved_tensors(compiled_graph(Gradients(network), [tokens], tmp_path, monkeypatch))
    one = 4 * tokens.size * TINY["intermediate_size"]
    # Gate and up side by side, and their product, which the adapter of the next linear cell needs.
    assert sum(saved.size for saved in kept if "mlp" in saved.scope and saved.size >= one) == 3 * one


class Gradients(nn.Cell):
    """The gradients of the loss of a network for rows of tokens, which it is to predict."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.weights = Loss(network), ms.ParameterTuple(network.trainable_params())
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, tokens):
        return self.gradient(self.network, self.weights)(tokens, tokens)
