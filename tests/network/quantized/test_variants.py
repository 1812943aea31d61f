"""Variants of LoRA on bases in few bits against numpy on the decoded weight, with gradients by finite differences."""

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoraError, apply_lora, merge_lora
from mindlora.core.errors import MergeError
from mindlora.core.numerics.dtypes import BFLOAT16
from mindlora.core.numerics.integers import IntegerForm
from mindlora.network.merge import in_float, merge_and_unload, sample
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.quantized.quantized_dense import IntegerDense
from mindlora.network.registry import kind_of
from tests.support.fewer_cases import each_once
from tests.support.networks import as_array, assert_close, gradients, normal, normal_dense, randomize

# Of which the last block of NF4 is not whole; integers take whole blocks alone.
WIDTHS = {"nf4": 70, "int4": 128, "int8": 128}
OUT, RANK = 5, 3
VARIANTS = {
    "dora": {"use_dora": True, "lora_alpha": 4.5},
    "vera": {"use_vera": True},
    "adalora": {"use_adalora": True, "init_r": RANK, "target_r": 2, "lora_alpha": 4.5},
    "miss": {"use_miss": True},
}
EPSILON = 1e-5
# All of them in PyNative; as graphs, each form and each variant.
_IN_MODES = [(ms.GRAPH_MODE, *case) for case in each_once(list(WIDTHS), list(VARIANTS))]
_IN_MODES += [(ms.PYNATIVE_MODE, form, variant) for form in WIDTHS for variant in VARIANTS]
EACH = pytest.mark.parametrize(
    "mode, form, variant",
    _IN_MODES,
    indirect=True,
    ids=[f"{'pynative' if mode else 'graph'}-{form}-{variant}" for mode, form, variant in _IN_MODES],
)


@pytest.fixture(params=WIDTHS)
def form(request):
    return request.param


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


def fill_integers(cell, seed=0):
    """Gives an IntegerDense random integers, zeros beside their middle, and scales."""
    rng = np.random.default_rng(seed)
    eight, shape = cell.quantization == "int8", cell.weight_zeros.shape
    zeros = rng.integers(-60, 9, shape, np.int8).view(np.uint8) if eight else rng.integers(0, 17, shape, np.uint8)
    cell.weight.set_data(Tensor(rng.integers(0, 256, cell.weight.shape, np.uint8)))
    cell.weight_zeros.set_data(Tensor(zeros))
    scales = rng.uniform(0.5, 1, shape) * (0.01 if eight else 0.2)
    cell.weight_scales.set_data(Tensor(scales.astype(np.float32), cell.weight_scales.dtype))


def quantized(form, **arguments):
    """Returns a linear cell whose weight is in a form, in groups of 32 columns if in integers."""
    dense = normal_dense(WIDTHS[form], OUT, **arguments)
    if form == "nf4":
        return NF4Dense.from_dense(dense, "wq")
    cell = IntegerDense.from_dense(dense, "wq", IntegerForm(int(form[3:]), WIDTHS[form] // 32, BFLOAT16))
    fill_integers(cell)
    return cell


def config_of(variant, **keys):
    rank = {} if variant == "adalora" else {"lora_rank": RANK}
    return LoraConfig(**{**rank, **VARIANTS[variant], **keys})


def adapted(form, variant, **keys):
    """Returns a cell with an adapter on a weight in a form, all of whose parts are normal."""
    cell, config = quantized(form), config_of(variant, **keys)
    lora = kind_of(cell, config).from_cell(cell, config)
    randomize([*lora.lora_parameters(), *lora.shared_parts().values()], seed=2)
    return lora


def weight_of(lora):
    return lora.by_rows()[:].astype(np.float64)


def values_of(lora):
    """The parts of the adapter, those that cells share among them, in float64."""
    return {part: as_array(parameter) for part, parameter in {**lora.shared_parts(), **lora.parts()}.items()}


def change_of(lora, parts):
    """What the adapter adds to the weight, but for magnitudes: [out, in]."""
    if "block" in parts:
        return parts["block"][:, np.arange(lora.in_channels) % RANK]
    a, b = parts["A"][:, : lora.in_channels], parts["B"][:OUT]
    if "lambda_d" in parts:
        return (parts["lambda_b"][:, None] * b) @ (parts["lambda_d"][:, None] * a)
    return lora.scale * b @ (parts.get("lambda", np.ones(RANK))[:, None] * a)


def oracle(lora, x, parts, norms=None):
    """y, with the given norms of rows, or those of the parts."""
    whole = weight_of(lora) + change_of(lora, parts)
    if "magnitude" in parts:
        norms = np.linalg.norm(whole, axis=1) if norms is None else norms
        whole = (parts["magnitude"] / norms)[:, None] * whole
    return x @ whole.T + as_array(lora.bias)


@EACH
def test_a_new_cell_is_the_base_and_a_trained_one_the_equation(mode, form, variant):
    cell, config = quantized(form), config_of(variant)
    lora = kind_of(cell, config).from_cell(cell, config)
    x = normal(2, 3, lora.in_channels)
    expected = cell(Tensor(x)).asnumpy()
    for training in (False, True):
        assert_close(lora.set_train(training)(Tensor(x)), expected.astype(np.float64))
    randomize([*lora.lora_parameters(), *lora.shared_parts().values()], seed=2)
    for training in (False, True):
        assert_close(lora.set_train(training)(Tensor(x)), oracle(lora, x, values_of(lora)))


@EACH
def test_gradients_are_finite_differences_and_w_gets_none(mode, form, variant):
    """With DoRA's norm held constant, as in its paper."""
    lora = adapted(form, variant).set_train()
    lora.bias.requires_grad = False
    x, weights, parts = normal(4, lora.in_channels), normal(4, OUT, seed=4), values_of(lora)
    norms = np.linalg.norm(weight_of(lora) + change_of(lora, parts), axis=1)
    assert [p.name for p in lora.trainable_params()] == [p.name for p in lora.trained_parameters()]
    found = gradients(lora, x, weights)
    inputs = {"x": x.astype(np.float64), **{part: parts[part] for part in lora.variant.trained_parts(lora.config)}}
    assert len(found) == len(inputs)
    for gradient, (name, array) in zip(found, inputs.items()):
        direction = np.random.default_rng(7).normal(size=array.shape)
        sums = []
        for step in (EPSILON, -EPSILON):
            moved = {**inputs, name: array + step * direction}
            y = oracle(lora, moved.pop("x"), {**parts, **moved}, norms)
            sums.append((weights * y).sum())
        slope = (sums[0] - sums[1]) / (2 * EPSILON)
        assert (as_array(gradient) * direction).sum() == pytest.approx(slope, rel=1e-4, abs=1e-4), name


def test_doras_dropout_is_pefts_on_the_decoded_weight(mode, form):
    """y = x W^T + (g - 1) x' W^T + g scale x' A^T B^T: with one column that is not zero, x' is 0 or 2 x."""
    lora = adapted(form, "dora", lora_dropout=0.5).set_train()
    x = np.zeros((40, lora.in_channels), np.float32)
    x[:, 1] = 1
    parts, bias = values_of(lora), as_array(lora.bias)
    plain = x[0] @ weight_of(lora).T + bias
    either = [plain, plain + 2 * (oracle(lora, x[:1], parts)[0] - plain)]
    found = lora(Tensor(x)).asnumpy()
    hits = [np.abs(found - row).max(axis=1) < 1e-4 for row in either]
    assert (hits[0] | hits[1]).all() and hits[0].any() and hits[1].any()


def test_dora_computes_in_the_dtype_of_the_plain_cell_with_norms_in_float32(mode, form):
    dense = functools.partial(normal_dense, WIDTHS[form], OUT, dtype=ms.float16, has_bias=False)
    cell = NF4Dense.from_dense(dense()) if form == "nf4" else quantized(form, dtype=ms.float16, has_bias=False)
    config = config_of("dora", param_init_type="float16")
    lora = kind_of(cell, config).from_cell(cell, config)
    # Whose squares are more than float16 holds.
    for name in ("weight_scales", "weight_offsets"):
        if hasattr(lora, name):
            parameter = getattr(lora, name)
            parameter.set_data(Tensor(parameter.astype(ms.float32).asnumpy() * 300, parameter.dtype))
    randomize(lora.lora_parameters(), seed=2)
    x, parts = normal(3, lora.in_channels) / 100, values_of(lora)
    whole = weight_of(lora) + change_of(lora, parts)
    expected = x @ (whole * (parts["magnitude"] / np.linalg.norm(whole, axis=1))[:, None]).T
    assert_close(lora(Tensor(x, ms.float16)), expected, "float16")


# The magnitude --------------------------------------------------------------------------------------------------


def test_a_magnitude_begins_as_the_norms_of_the_decoded_rows(form):
    cell, config = quantized(form), config_of("dora", lora_b_init="normal")
    lora = kind_of(cell, config).from_cell(cell, config).set_train()
    norms = np.linalg.norm(weight_of(lora) + change_of(lora, values_of(lora)), axis=1)
    np.testing.assert_allclose(lora.parts()["magnitude"].asnumpy(), norms, rtol=1e-6)


def test_another_base_with_the_same_codes_is_another_base(form):
    """It counts until the magnitude is trained, and is refused after that."""
    cell, config = quantized(form), config_of("dora")
    lora = kind_of(cell, config).from_cell(cell, config).set_train()
    first = lora.parts()["magnitude"].asnumpy().copy()

    def double():
        for name in ("weight_scales", "weight_offsets"):
            if hasattr(lora, name):
                parameter = getattr(lora, name)
                parameter.set_data(Tensor(parameter.astype(ms.float32).asnumpy() * 2, parameter.dtype))

    double()
    np.testing.assert_allclose(lora.set_train().parts()["magnitude"].asnumpy(), 2 * first, rtol=1e-6)
    lora.parts()["magnitude"].set_data(Tensor(first))
    double()
    with pytest.raises(LoraError, match="was loaded after its DoRA magnitude was initialized"):
        lora.set_train()


# In float again -------------------------------------------------------------------------------------------------


def test_back_in_float_it_is_the_decoded_cell(form, variant):
    lora = adapted(form, variant, lora_dropout=0.25)
    x = normal(3, lora.in_channels)
    expected = lora(Tensor(x)).asnumpy()
    back = in_float(lora)
    assert back.variant is lora.variant and back.lora_parameters() == lora.lora_parameters()
    assert back.shared_parts() == lora.shared_parts() and back.dropout_rate == 0.25 and not back.quantization
    np.testing.assert_array_equal(back.weight.asnumpy(), weight_of(lora).astype(np.float32))
    assert_close(back(Tensor(x)), expected.astype(np.float64))


def test_a_merge_is_into_the_decoded_weight(form, variant):
    lora = adapted(form, variant)
    parts, bias = values_of(lora), as_array(lora.bias)
    expected = oracle(lora, np.eye(lora.in_channels), parts).T - bias[:, None]
    np.testing.assert_allclose(sum(sample(lora, 4)), expected[:4], rtol=0, atol=1e-5)
    network = nn.SequentialCell(lora).set_train(False)
    with pytest.raises(MergeError, match="are quantized"):
        merge_lora(network)
    merge_and_unload(network)
    assert type(network[0]) is nn.Dense
    assert_close(network[0].weight, expected)


# In a network ---------------------------------------------------------------------------------------------------


def test_vera_shares_one_projection_between_cells_in_few_bits_and_in_float():
    network = nn.SequentialCell(nn.Dense(64, 6), nn.Dense(6, 80), nn.Dense(80, 3))
    config = LoraConfig(lora_rank=4, use_vera=True, quantize_base="nf4", quantize_exclude="1", target_modules=".*")
    apply_lora(network, config)
    assert [cell.quantization for cell in network] == ["nf4", None, "nf4"]
    (shared,) = {tuple(map(id, cell.shared_parts().values())) for cell in network}
    assert [p.shape for p in network[0].shared_parts().values()] == [(4, 80), (80, 4)]
    assert len([p for p in network.get_parameters() if "vera_a" in p.name]) == 1 and len(shared) == 2


def test_after_a_refused_merge_the_cells_hold_few_bits_as_before():
    network = nn.SequentialCell(adapted("nf4", "dora")).set_train(False)
    network[0].parts()["magnitude"].set_data(Tensor(np.array([np.nan, *np.ones(OUT - 1)], np.float32)))
    with pytest.raises(MergeError, match="W, A or B holds NaN or infinity"):
        merge_and_unload(network)
    assert network[0].quantization == "nf4" and not hasattr(network[0].base_cell.emptied_cell, "weight")
