"""VeRADense against numpy: the equation, gradients of only its vectors, what cells share, merging, refusals."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, trainable_summary
from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.initializers import vera_projection
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.tree import lora_cells
from mindlora.network.variants.vera import VeRADense
from tests.support.lora_dense import Each
from tests.support.networks import (
    TinyModel,
    WeightedSum,
    adapters,
    as_array,
    assert_close,
    gradients,
    linear_cell,
    normal,
    normal_dense,
    randomize,
    snapshot,
)

IN, OUT, RANK = 7, 5, 3
CONFIG = LoraConfig(lora_rank=RANK, use_vera=True, target_modules=["wq", "wk", "w2"])
# Cells of [6, 6], [4, 6] and [6, 9], twice.
NAMES = ("lambda_d", "lambda_b")
VERA_A, VERA_B = "mindpet_delta_lora_vera_a", "mindpet_delta_lora_vera_b"


@pytest.fixture(params=["dense", "dense with relu", "linear with silu"])
def plain(request, mindformers):
    """A linear cell with normal weights, and its activation in numpy."""
    return linear_cell(request.param, IN, OUT, mindformers)


def widest(cell):
    """A and B of a network with larger cells."""
    a, b = vera_projection(4, RANK, cell.in_channels + 4, cell.out_channels + 2)
    return tuple(
        ms.Parameter(Tensor(array), name=name, requires_grad=False) for array, name in ((a, VERA_A), (b, VERA_B))
    )


def adapted(cell, **options):
    """Returns a VeRADense over ``cell``, smaller than A and B, with normal vectors."""
    vera = VeRADense.from_cell(cell, LoraConfig(lora_rank=RANK, use_vera=True, **options), widest(cell))
    randomize(vera.lora_parameters(), seed=2)
    return vera


def oracle(vera, x, activation=None):
    a, b = (as_array(p) for p in vera.shared_parts().values())
    d, along = (as_array(p) for p in vera.lora_parameters())
    y = x @ as_array(vera.weight).T + along * (((x @ a[:, : vera.in_channels].T) * d) @ b[: vera.out_channels].T)
    if vera.bias is not None:
        y = y + as_array(vera.bias)
    return y if activation is None else activation(y)


def model(config=CONFIG):
    network = TinyModel()
    randomize(network.get_parameters(), seed=5)
    apply_lora(network, config)
    return network


# The equation ---------------------------------------------------------------------------------------------------


def test_a_new_cell_is_the_plain_one_and_a_trained_one_the_equation(mode, plain):
    cell, activation = plain
    inputs = [normal(3, IN), normal(2, 1, 3, IN)]
    tensors = [Tensor(x) for x in inputs]
    expected = [y.asnumpy() for y in Each(cell)(*tensors)]
    vera = VeRADense.from_cell(cell, LoraConfig(lora_rank=RANK, use_vera=True, d_initial=0.25))
    for y, wanted in zip(Each(vera)(*tensors), expected):
        np.testing.assert_array_equal(y.asnumpy(), wanted)
    np.testing.assert_array_equal(vera.mindpet_delta_lora_lambda_d.asnumpy(), np.full(RANK, 0.25, np.float32))
    np.testing.assert_array_equal(vera.mindpet_delta_lora_lambda_b.asnumpy(), np.zeros(OUT, np.float32))
    vera = adapted(vera.plain_cell())
    for x, y in zip(inputs, Each(vera)(*tensors)):
        assert_close(y, oracle(vera, x, activation))


@pytest.mark.parametrize("in_channels, out_channels", [(1, 1), (1, 5), (13, 1), (40, 300)])
def test_odd_sizes(mode, in_channels, out_channels):
    vera, x = adapted(normal_dense(in_channels, out_channels)), normal(3, in_channels)
    assert_close(vera(Tensor(x)), oracle(vera, x))


def test_gradients_reach_x_and_the_vectors_alone(mode):
    vera, x, weights = adapted(normal_dense(IN, OUT)).set_train(), normal(4, IN), normal(4, OUT, seed=4)
    of_x, of_d, of_b = gradients(vera, x, weights)
    a, b = (as_array(p) for p in vera.shared_parts().values())
    a, b = a[:, :IN], b[:OUT]
    d, along = (as_array(p) for p in vera.lora_parameters())
    shrunk, slope = x @ a.T, weights * along
    assert_close(of_x, weights @ as_array(vera.weight) + ((slope @ b) * d) @ a)
    assert_close(of_d, ((slope @ b) * shrunk).sum(0))
    assert_close(of_b, (weights * ((shrunk * d) @ b.T)).sum(0))


def test_dropout_is_on_the_low_rank_path(mode):
    dense = nn.Dense(1, 4, has_bias=False)
    vera = adapted(dense, lora_dropout=0.5).set_train()
    x = np.ones((30, 1), np.float32)
    base = x @ as_array(vera.weight).T
    either = [base[0], base[0] + 2 * (oracle(vera, x) - base)[0]]  # the dropped x is 0 or 2
    found = vera(Tensor(x)).asnumpy()
    hits = [np.abs(found - row).max(axis=1) < 1e-5 for row in either]
    assert (hits[0] | hits[1]).all() and hits[0].any() and hits[1].any()
    assert_close(vera.set_train(False)(Tensor(x)), oracle(vera, x))


@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "weight_dtype, compute_dtype", [("float16", None), ("float16", "float32"), ("bfloat16", "float32")]
)
def test_dtypes(mode, weight_dtype, compute_dtype, param_init_type):
    dense = normal_dense(IN, OUT, has_bias=False, dtype=getattr(ms, weight_dtype))
    vera = VeRADense.from_cell(
        dense, LoraConfig(lora_rank=RANK, use_vera=True, compute_dtype=compute_dtype, param_init_type=param_init_type)
    )
    assert {p.dtype for p in (*vera.lora_parameters(), *vera.shared_parts().values())} == {getattr(ms, param_init_type)}
    randomize(vera.lora_parameters(), seed=2)
    x = Tensor(normal(2, 3, IN), dense.weight.dtype)
    y = vera(x)
    assert y.dtype == x.dtype
    assert_close(y, oracle(vera, as_array(x)), "bfloat16" if weight_dtype == "bfloat16" else "float16")


# A network ------------------------------------------------------------------------------------------------------


def test_cells_share_the_matrices_of_the_widest():
    network = model()
    cells = [cell for _, cell in lora_cells(network)]
    assert len(cells) == 6 and all(type(cell) is VeRADense for cell in cells)
    for name, shape in ((VERA_A, (RANK, 9)), (VERA_B, (6, RANK))):
        assert len({id(getattr(cell, name)) for cell in cells}) == 1
        assert getattr(cells[0], name).shape == shape and not getattr(cells[0], name).requires_grad
    for array, parameter in zip(vera_projection(0, RANK, 9, 6), cells[0].shared_parts().values()):
        np.testing.assert_array_equal(parameter.asnumpy(), array)
    assert [name for name in adapters(network) if "vera" in name] == [VERA_A, VERA_B]
    other = model(LoraConfig(lora_rank=RANK, use_vera=True, projection_prng_key=1, target_modules=["wq"]))
    assert np.abs(adapters(other)[VERA_A].asnumpy() - vera_projection(0, RANK, 6, 6)[0]).max() > 0.1


def test_only_the_vectors_train():
    network = model()
    freeze_base(network)
    trained = {p.name for p in network.trainable_params()}
    assert trained == {
        f"model.layers.{layer}.{cell}.mindpet_delta_lora_{name}"
        for layer in (0, 1)
        for name in NAMES
        for cell in ("attention.wq", "attention.wk", "feed_forward.w2")
    }
    count = 2 * (3 * RANK + 6 + 4 + 6)
    assert sum(p.size for p in network.trainable_params()) == count
    assert f"trainable params: {count} ||" in trainable_summary(network)


def test_training_moves_the_loss(mode):
    network = model(LoraConfig(lora_rank=RANK, use_vera=True, d_initial=1.0, target_modules=["wq", "wk", "w2"]))
    freeze_base(network)
    network.set_train()
    frozen = {name: p.asnumpy().copy() for name, p in adapters(network).items() if "vera" in name}
    loss = WeightedSum(network)
    x, weights = Tensor(normal(4, 6)), Tensor(normal(4, 8, seed=4))
    optimizer = nn.Adam(network.trainable_params(), 0.01)
    step = ms.value_and_grad(loss, None, network.trainable_params())
    losses = []
    for _ in range(4):
        value, gradients = step(x, weights)
        optimizer(gradients)
        losses.append(float(value.asnumpy()))
    assert losses[-1] < losses[0] - 0.05
    for name, array in frozen.items():
        np.testing.assert_array_equal(adapters(network)[name].asnumpy(), array)


# Merging --------------------------------------------------------------------------------------------------------


def test_merged_and_unmerged(mode):
    network, x = model(), Tensor(normal(3, 6))
    randomize([p for _, cell in lora_cells(network) for p in cell.lora_parameters()], seed=2)
    before, expected = snapshot(network), network(x).asnumpy()
    wq = network.model.layers[0].attention.wq
    a, b = (as_array(p) for p in wq.shared_parts().values())
    d, along = (as_array(p) for p in wq.lora_parameters())
    weight = as_array(wq.weight) + (along[:, None] * b) @ (d[:, None] * a[:, :6])
    report = merge_lora(network, x)
    assert len(report.merged) == 6 and report.difference <= report.bound
    np.testing.assert_allclose(wq.weight.asnumpy(), weight, atol=1e-6)
    assert not wq.mindpet_delta_lora_lambda_b.asnumpy().any()
    assert_close(network(x), expected)
    unmerge_lora(network)
    assert snapshot(network) == before
    merge_and_unload(network)
    assert not list(lora_cells(network)) and not adapters(network)
    assert_close(network(x), expected)


# What is refused ------------------------------------------------------------------------------------------------


class Others(nn.Cell):
    """An embedding, a convolution and a linear cell."""

    def __init__(self):
        super().__init__()
        self.table, self.patch, self.head = nn.Embedding(5, 3), nn.Conv2d(3, 4, 3), nn.Dense(3, 4)


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "table",
            "use_vera is not supported on embeddings: its shared matrices have the columns and rows of linear cells. "
            "Leave use_vera out, or add the cell to exclude_modules.",
        ),
        (
            "patch",
            "use_vera is not supported on convolutions: its shared matrices have the columns and rows of linear "
            "cells. Leave use_vera out, or add the cell to exclude_modules.",
        ),
    ],
)
def test_cells_that_are_not_linear(name, message):
    with pytest.raises(UnsupportedCellError) as error:
        apply_lora(Others(), LoraConfig(use_vera=True, target_modules=[name, "head"]))
    assert str(error.value) == f"LoRA cannot be put on 1 of the selected cells. {name}: {message}"


def test_sharded_cells_are_refused(mindformers):
    linear = mindformers.modules.layers.Linear(4, 4)
    linear.shard(((1, 1), (2, 1)))
    with pytest.raises(UnsupportedCellError, match="use_vera is not supported on sharded cells: all cells"):
        VeRADense.from_cell(linear, CONFIG)
