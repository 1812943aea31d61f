"""DoRADense against numpy: equation, gradients with a constant norm, dropout, and how its magnitude is initialized."""

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoraError, apply_lora, freeze_base, save_lora, trainable_summary
from mindlora.core.errors import UnsupportedCellError
from mindlora.models.variants.registry import PARAMETERS
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.variants.dora import DoRADense, row_norms
from tests.support.lora_dense import Each
from tests.support.networks import (
    TinyModel,
    as_array,
    assert_close,
    gradients,
    linear_cell,
    normal,
    normal_dense,
    randomize,
    snapshot,
)

IN, OUT, RANK, ALPHA = 7, 5, 3, 4.5
SCALE = ALPHA / RANK
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, use_dora=True)
small_dense = functools.partial(normal_dense, IN, OUT)


@pytest.fixture(params=["dense", "dense with relu", "linear with silu"])
def plain(request, mindformers):
    """A linear cell with normal weights, and its activation in numpy."""
    return linear_cell(request.param, IN, OUT, mindformers)


def adapted(cell, config=CONFIG):
    """Returns a DoRADense over ``cell`` whose A, B and magnitude are normal; some magnitudes are below zero."""
    dora = DoRADense.from_dense(cell, config)
    randomize(dora.lora_parameters(), seed=2)
    return dora


def directions(dora):
    """W + scale B A and its row norms, in float64."""
    weight, (a, b) = as_array(dora.weight), (as_array(p) for p in dora.lora_parameters()[:2])
    whole = weight + dora.scale * b @ a
    return whole, np.linalg.norm(whole, axis=1)


def oracle(dora, x, activation=None):
    whole, norms = directions(dora)
    y = x @ (as_array(dora.mindpet_delta_lora_magnitude) / norms * whole.T)
    if dora.bias is not None:
        y = y + as_array(dora.bias)
    return y if activation is None else activation(y)


# The equation ---------------------------------------------------------------------------------------------------


def test_a_new_cell_is_the_plain_one_and_a_trained_one_the_equation(mode, plain):
    cell, activation = plain
    inputs = [normal(3, IN), normal(2, 1, 3, IN)]
    tensors = [Tensor(x) for x in inputs]
    expected = [y.asnumpy() for y in Each(cell)(*tensors)]
    dora = DoRADense.from_dense(cell, CONFIG)
    for y, wanted in zip(Each(dora)(*tensors), expected):
        np.testing.assert_array_equal(y.asnumpy(), wanted)  # before the magnitude is initialized
    dora.set_train()
    for y, wanted in zip(Each(dora)(*tensors), expected):
        assert_close(y, wanted)
    dora.set_train(False)
    randomize(dora.lora_parameters(), seed=2)
    for x, y in zip(inputs, Each(dora)(*tensors)):
        assert_close(y, oracle(dora, x, activation))


@pytest.mark.parametrize(
    "in_channels, out_channels, rank", [(1, 1, 1), (1, 5, 3), (13, 1, 2), (3, 4, 17), (40, 300, 2)]
)
def test_odd_sizes(mode, in_channels, out_channels, rank):
    dora = DoRADense(in_channels, out_channels, rank, 2, use_rslora=True)
    randomize(dora.get_parameters())
    x = normal(3, in_channels)
    assert dora.scale == pytest.approx(2 / rank**0.5)
    assert_close(dora(Tensor(x)), oracle(dora, x))


def test_gradients_hold_the_norm_constant(mode, plain):
    cell, _ = plain
    if cell.activation_flag:
        cell.activation_flag = False
    dora, x, weights = adapted(cell).set_train(), normal(4, IN), normal(4, OUT, seed=4)
    of_x, of_a, of_b, of_m = gradients(dora, x, weights)
    (whole, norms), (a, b, m) = directions(dora), (as_array(p) for p in dora.lora_parameters())
    slope = weights * (m / norms)
    assert_close(of_x, slope @ whole)
    assert_close(of_a, SCALE * (slope @ b).T @ x)
    assert_close(of_b, SCALE * slope.T @ (x @ a.T))
    assert_close(of_m, (weights * (x @ whole.T) / norms).sum(0))


def test_dropout_is_peft_s(mode):
    """y = x W^T + (g - 1) x' W^T + g scale x' A^T B^T; with W = 1 and A = 0 it shows the dropped x'."""
    dora = DoRADense(64, 64, 2, 4, 0.25, has_bias=False)
    dora.weight.set_data(Tensor(np.eye(64, dtype=np.float32)))
    dora.mindpet_delta_lora_magnitude.set_data(Tensor(np.full(64, 3, np.float32)))
    dora.set_train()
    x = normal(50, 64) + 10
    dropped = (dora(Tensor(x)).asnumpy() - x) / 2 / x
    kept = dropped > 0.5
    np.testing.assert_allclose(dropped, np.where(kept, 4 / 3, 0), atol=1e-5)
    assert 0.7 < kept.mean() < 0.8
    np.testing.assert_allclose(dora.set_train(False)(Tensor(x)).asnumpy(), 3 * x, rtol=1e-6)


def test_dropout_is_on_the_low_rank_path_too(mode):
    dora = adapted(nn.Dense(1, 4, has_bias=False), LoraConfig(lora_rank=2, lora_dropout=0.5, use_dora=True)).set_train()
    x = np.ones((30, 1), np.float32)
    (whole, norms), weight = directions(dora), as_array(dora.weight)
    gain = as_array(dora.mindpet_delta_lora_magnitude) / norms
    either = [weight.T, weight.T + 2 * (gain * whole.T - weight.T)]  # x' is 0 or 2
    found = dora(Tensor(x)).asnumpy()
    hits = [np.abs(found - row).max(axis=1) < 1e-4 for row in either]
    assert (hits[0] | hits[1]).all() and hits[0].any() and hits[1].any()


@pytest.mark.parametrize("param_init_type", ["float32", "float16"])
@pytest.mark.parametrize(
    "weight_dtype, compute_dtype",
    [("float16", None), ("float16", "float32"), ("float32", "float16"), ("bfloat16", "float32")],
)
def test_dtypes(mode, weight_dtype, compute_dtype, param_init_type):
    dense = small_dense(has_bias=False, dtype=getattr(ms, weight_dtype))
    dora = adapted(
        dense,
        LoraConfig(
            lora_rank=RANK,
            lora_alpha=ALPHA,
            param_init_type=param_init_type,
            use_dora=True,
            compute_dtype=compute_dtype,
        ),
    )
    x = Tensor(normal(2, 3, IN), dense.weight.dtype)
    y = dora(x)
    assert y.dtype == x.dtype
    assert_close(y, oracle(dora, as_array(x)), "float16" if weight_dtype != "bfloat16" else "bfloat16")


def test_norms_beyond_float16(mode):
    dora = DoRADense.from_dense(
        nn.Dense(IN, OUT, weight_init=Tensor(np.full((OUT, IN), 300), ms.float16), has_bias=False, dtype=ms.float16),
        CONFIG,
    ).set_train()
    y = dora(Tensor(np.full((1, IN), 0.01, np.float16)))
    np.testing.assert_allclose(y.asnumpy(), 21, rtol=5e-3)  # 300^2 is more than float16 holds


# The initial magnitude -----------------------------------------------------------------------------------------


def magnitude(dora):
    return as_array(dora.mindpet_delta_lora_magnitude)


def load(dora, seed):
    """Loads another base."""
    dora.weight.set_data(Tensor(normal(OUT, IN, seed=seed)))


def test_the_magnitude_is_initialized_when_it_is_needed():
    dora = DoRADense.from_dense(small_dense(), LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_b_init="normal"))
    dora.set_train(False)
    assert np.isnan(magnitude(dora)).all()
    load(dora, 5)
    dora.set_train()
    np.testing.assert_allclose(magnitude(dora), directions(dora)[1], rtol=1e-6)
    trains = small_dense().set_train()
    dora = DoRADense.from_dense(trains, CONFIG)  # whose set_train is not called
    np.testing.assert_allclose(magnitude(dora), directions(dora)[1], rtol=1e-6)


def test_training_without_an_initialized_magnitude_gives_nan():
    dora = DoRADense.from_dense(small_dense(), CONFIG)
    dora.training = True
    assert np.isnan(dora(Tensor(normal(2, IN))).asnumpy()).all()


def test_a_base_that_is_loaded_late_counts_until_the_magnitude_is_trained():
    dora = DoRADense.from_dense(small_dense(), CONFIG).set_train()
    dora.weight.requires_grad = False
    load(dora, 5)
    dora.set_train()
    np.testing.assert_allclose(magnitude(dora), np.linalg.norm(normal(OUT, IN, seed=5), axis=1), rtol=1e-6)
    load(dora, 6)
    dora.mindpet_delta_lora_magnitude.set_data(Tensor(normal(OUT)))
    for call in (dora.set_train, lambda: save_lora(dora, "nowhere"), lambda: merge_lora(dora.set_train(False))):
        with pytest.raises(LoraError) as error:
            call()
        assert str(error.value) == (
            "The weight of the cell was loaded after its DoRA magnitude was initialized from "
            "another weight and trained. Load the base before set_train(True)."
        )


def test_what_was_trained_is_kept():
    dora = DoRADense.from_dense(small_dense(), CONFIG).set_train()
    dora.weight.requires_grad = False
    started = magnitude(dora)
    randomize(dora.lora_parameters()[:2], seed=8)  # as if freeze_include froze the magnitude
    dora.set_train()
    np.testing.assert_array_equal(magnitude(dora), started)
    dora.mindpet_delta_lora_magnitude.set_data(Tensor(normal(OUT)))
    dora.set_train()
    load(dora, 6)
    dora.set_train()  # the base was correct when training began
    np.testing.assert_array_equal(magnitude(dora), normal(OUT))


def test_a_base_that_trains_too_is_not_mistaken_for_another():
    dora = DoRADense.from_dense(small_dense(), CONFIG).set_train()
    load(dora, 5)
    dora.mindpet_delta_lora_magnitude.set_data(Tensor(normal(OUT)))
    dora.set_train()
    np.testing.assert_array_equal(magnitude(dora), normal(OUT))


def test_rows_of_zeros_are_refused():
    dense = small_dense()
    dense.weight.set_data(Tensor(np.diag([1, 0, 2, 0, 3, 0, 0])[:OUT].astype(np.float32)))
    network = nn.SequentialCell(dense)
    apply_lora(network, LoraConfig(target_modules=".*", use_dora=True))
    with pytest.raises(LoraError) as error:
        network.set_train()
    assert str(error.value) == (
        "The weight of 0 has 2 rows of zeros, which have no direction, so DoRA is not defined "
        "there. Add it to exclude_modules, or train plain LoRA."
    )


def test_a_weight_without_values_delays_the_magnitude():
    from mindspore.nn.utils import no_init_parameters

    with no_init_parameters():
        dora = DoRADense.from_dense(nn.Dense(IN, OUT), CONFIG)
    dora.set_train()
    dora.init_parameters_data()
    assert np.isnan(magnitude(dora)).all()
    dora.set_train()
    np.testing.assert_allclose(magnitude(dora), directions(dora)[1], rtol=1e-6)


def test_row_norms_of_many_rows():
    weight, a, b = normal(700, 9), normal(2, 9), normal(700, 2)
    np.testing.assert_allclose(row_norms(weight, a, b, 0.5), np.linalg.norm(weight + 0.5 * b @ a, axis=1), rtol=1e-5)


# In a network ---------------------------------------------------------------------------------------------------


def dora_model(**keys):
    network = TinyModel()
    config = {"lora_rank": 2, "lora_alpha": 4, "target_modules": ["wq", "w2"], **keys}
    apply_lora(network, LoraConfig(use_dora=True, **config))
    freeze_base(network)
    return network


def test_names_and_what_trains():
    network = dora_model()
    trained = {p.name for p in network.trainable_params()}
    assert trained == {
        f"model.layers.{layer}.{cell}.mindpet_delta_lora_{part}"
        for layer in (0, 1)
        for cell in ("attention.wq", "feed_forward.w2")
        for part in ("a", "b", "magnitude")
    }
    assert trainable_summary(network).endswith(
        f"trainable params: {2 * (24 + 6 + 30 + 6)} || all params: "
        f"{sum(p.size for p in network.get_parameters())} || trainable%: "
        f"{13200 / sum(p.size for p in network.get_parameters()):.4f}"
    )


def test_training_lowers_the_loss(mode):
    ms.set_seed(0)  # from other weights four steps may not be enough
    network = dora_model()
    network.set_train()
    x, start = Tensor(normal(5, 6)), snapshot(network)

    def distance(x):
        return ((network(x) - 1) ** 2).mean()

    step = ms.value_and_grad(distance, None, network.trainable_params())
    losses = []
    descend = nn.SGD(network.trainable_params(), 0.2)
    for _ in range(4):
        loss, gradients = step(x)
        losses.append(float(loss.asnumpy()))
        descend(gradients)
    assert losses[-1] < 0.9 * losses[0]
    changed = {name for name, content in snapshot(network).items() if content != start[name]}
    assert changed == {p.name for p in network.trainable_params()}


def test_a_sharded_cell_is_refused(mindformers):
    linear = mindformers.modules.layers.Linear(8, 8)
    linear.matmul.in_strategy = ((1, 1), (2, 1))
    with pytest.raises(UnsupportedCellError) as error:
        DoRADense.from_dense(linear, CONFIG)
    assert str(error.value) == (
        "use_dora is not supported on sharded cells: the norm of a row of W + scale B A needs all of the row. "
        "Leave use_dora out, or train in data parallel (parallel_mode: 0)."
    )


# Merging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_merged_weights_and_unmerged_ones(mode, dtype):
    network = nn.SequentialCell(small_dense(dtype=getattr(ms, dtype)))
    apply_lora(network, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, use_dora=True, target_modules=".*"))
    randomize(network[0].lora_parameters(), seed=2)
    cell, x = network[0], Tensor(normal(3, IN), getattr(ms, dtype))
    whole, norms = directions(cell)
    expected, before, y = (magnitude(cell) / norms)[:, None] * whole, snapshot(network), as_array(network(x))
    assert (magnitude(cell) < 0).any()
    report = merge_lora(network)
    assert_close(cell.weight, expected, dtype)
    assert 0 < report.difference <= report.bound
    assert_close(network(x), y, dtype)  # the same graph as before
    unmerge_lora(network)
    assert snapshot(network) == before
    np.testing.assert_array_equal(as_array(network(x)), y)
    merge_and_unload(network)
    assert type(network[0]) is nn.Dense
    assert_close(network(x), y, dtype)


def test_merging_before_any_training_changes_nothing_but_roundings():
    network = dora_model()
    before = {name: p.asnumpy().copy() for name, p in network.parameters_and_names()}
    merge_lora(network)
    np.testing.assert_allclose(
        network.model.layers[0].attention.wq.weight.asnumpy(), before["model.layers.0.attention.wq.weight"], rtol=3e-7
    )


def test_the_magnitude_s_parameter_name():
    assert DoRADense(2, 2, 1, 1).mindpet_delta_lora_magnitude.name == PARAMETERS["magnitude"]
