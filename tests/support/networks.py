"""Shared by many tests: the NumPy oracle, small networks, and functions that look at a network's parameters."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

# How far a result may be from the float64 oracle, relative to the largest element of the oracle.
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 3e-2}


def lora_forward(x, weight, a, b, scale, bias=None, activation=None):
    """The oracle: activation(x W^T + bias + scale (x A^T) B^T) in float64."""
    x, weight, a, b = (np.asarray(array, np.float64) for array in (x, weight, a, b))
    y = x @ weight.T + scale * (x @ a.T) @ b.T
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return y if activation is None else activation(y)


def assert_close(actual, expected, dtype="float32"):
    """Asserts that ``actual`` (Tensor or array) has the expected shape, and values as close as ``dtype`` allows."""
    actual = as_array(actual)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * max(np.abs(expected).max(), 1e-3))


def as_array(value):
    """Returns a Tensor, Parameter or array as float64, whatever its dtype."""
    return np.asarray(value.asnumpy() if isinstance(value, Tensor) else value).astype(np.float64)


def randomize(parameters, seed=0):
    """Gives parameters normal values, so that neither A nor B is zero."""
    rng = np.random.default_rng(seed)
    for parameter in parameters:
        parameter.set_data(Tensor(rng.normal(size=parameter.shape).astype(np.float32), parameter.dtype))


def normal(*shape, seed=3):
    """Returns normal values in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def gradients(cell, x, weights):
    """Returns d sum(cell(x) * weights) / d x, then / d each tensor of the adapter, as MindSpore computes them."""
    of_x, of_adapter = ms.grad(WeightedSum(cell), 0, cell.lora_parameters())(Tensor(x), Tensor(weights))
    return (of_x, *of_adapter)


def adapters(network):
    """Returns the A and B of a network, by name."""
    return {p.name: p for p in network.get_parameters() if "mindpet_delta_lora" in p.name}


def snapshot(network):
    """Returns the bytes of every parameter of a network, by name."""
    return {p.name: p.asnumpy().tobytes() for p in network.get_parameters()}


def _relu(y):
    return np.maximum(y, 0)


def _silu(y):
    return y / (1 + np.exp(-y))


# Linear cells by name: nn.Dense, mint.nn.Linear or MindFormers' Linear, what they are built with, and their activation
# in numpy.
LINEAR_CELLS = {
    "dense": ("Dense", {"has_bias": False}, None),
    "dense with bias": ("Dense", {}, None),
    "dense with relu": ("Dense", {"activation": "relu"}, _relu),
    "linear": ("Linear", {"has_bias": False}, None),
    "linear with bias": ("Linear", {}, None),
    "linear with silu": ("Linear", {"activation": "silu"}, _silu),
    "mint": ("mint.nn.Linear", {"bias": False}, None),
    "mint with bias": ("mint.nn.Linear", {}, None),
}


def linear_cell(name, in_channels, out_channels, mindformers):
    """Returns one of LINEAR_CELLS with normal weights, and its activation."""
    kind, arguments, activation = LINEAR_CELLS[name]
    if kind == "Dense":
        return normal_dense(in_channels, out_channels, **arguments), activation
    if kind == "mint.nn.Linear":
        cell = mint.nn.Linear(in_channels, out_channels, **arguments)
    else:
        cell = mindformers.modules.layers.Linear(in_channels, out_channels, compute_dtype=ms.float32, **arguments)
    randomize(cell.get_parameters(), seed=1)
    return cell, activation


def normal_dense(in_channels, out_channels, seed=1, **arguments):
    """Returns an nn.Dense with normal weights."""
    cell = nn.Dense(in_channels, out_channels, **arguments)
    randomize(cell.get_parameters(), seed)
    return cell


class WeightedSum(nn.Cell):
    """sum(network(x) * weights), a scalar whose gradients are easy to compute in NumPy."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, weights):
        return (self.network(x) * weights).sum()


class Attention(nn.Cell):
    """The four linear cells of an attention under MindFormers' names, with a sum in place of the softmax."""

    def __init__(self):
        super().__init__()
        self.wq = nn.Dense(6, 6, has_bias=False)
        self.wk = nn.Dense(6, 4, has_bias=False)
        self.wv = nn.Dense(6, 4, has_bias=False)
        self.wo = nn.Dense(6, 6, has_bias=False)

    def construct(self, x):
        return self.wo(self.wq(x)) + self.wk(x).sum() + self.wv(x).mean()


class FeedForward(nn.Cell):
    """The three linear cells of a feed-forward layer under MindFormers' names."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Dense(6, 9, activation="sigmoid")
        self.w2 = nn.Dense(9, 6)
        self.w3 = nn.Dense(6, 9)

    def construct(self, x):
        return self.w2(self.w1(x) * self.w3(x))


class Layer(nn.Cell):
    """A decoder layer."""

    def __init__(self):
        super().__init__()
        self.attention_norm = nn.LayerNorm((6,))
        self.attention = Attention()
        self.feed_forward = FeedForward()

    def construct(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(x)


class Backbone(nn.Cell):
    """The layers of TinyModel."""

    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.CellList([Layer() for _ in range(num_layers)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class TinyModel(nn.Cell):
    """Cells of nn.Dense named and nested as in MindFormers' Llama: model.layers.N.{attention,feed_forward}, lm_head."""

    def __init__(self, num_layers=2):
        super().__init__()
        self.model = Backbone(num_layers)
        self.lm_head = nn.Dense(6, 8, has_bias=False)

    def construct(self, x):
        return self.lm_head(self.model(x))


class HuggingFaceAttention(nn.Cell):
    """Linear cells under Hugging Face's names, as in networks ported from there."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Dense(6, 6)
        self.v_proj = nn.Dense(6, 6)

    def construct(self, x):
        return self.q_proj(x) + self.v_proj(x)


class HuggingFaceLayer(nn.Cell):
    """A layer that holds only attention."""

    def __init__(self):
        super().__init__()
        self.self_attn = HuggingFaceAttention()

    def construct(self, x):
        return self.self_attn(x)
