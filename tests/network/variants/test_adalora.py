"""AdaLoRADense against numpy: the equation, gradients, the plain LoRA it is saved as, merging, refusals."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, trainable_summary
from mindlora.core.errors import UnsupportedCellError
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.tree import lora_cells
from mindlora.network.variants.adalora import AdaLoRADense
from mindlora.training.health.adapter_health import cell_values, measure
from tests.support.lora_dense import Each
from tests.support.networks import (
    TinyModel,
    as_array,
    assert_close,
    gradients,
    linear_cell,
    lora_forward,
    normal,
    randomize,
    snapshot,
)

IN, OUT, RANK, ALPHA = 7, 5, 4, 6
CONFIG = LoraConfig(use_adalora=True, init_r=RANK, target_r=2, lora_alpha=ALPHA, target_modules=["wq", "w2"])
SCALE = ALPHA / (RANK + 1e-5)


@pytest.fixture(params=["dense with relu", "linear with silu"])
def plain(request, mindformers):
    """A linear cell with normal weights, and its activation in numpy."""
    return linear_cell(request.param, IN, OUT, mindformers)


def adapted(cell, masked=(), **options):
    """Returns an AdaLoRADense over ``cell`` with normal values, and zeros in Lambda at ``masked``."""
    options = {"init_r": RANK, "target_r": 2, "lora_alpha": ALPHA, **options}
    result = AdaLoRADense.from_cell(cell, LoraConfig(use_adalora=True, **options))
    randomize(result.lora_parameters(), seed=2)
    mask(result, masked)
    return result


def mask(cell, triplets):
    values = cell.mindpet_delta_lora_lambda.asnumpy().copy()
    values[list(triplets)] = 0
    cell.mindpet_delta_lora_lambda.set_data(Tensor(values))


def oracle(cell, x, activation=None):
    a, b, weights = (as_array(p) for p in cell.lora_parameters())
    return lora_forward(x, as_array(cell.weight), weights[:, None] * a, b, SCALE, *bias_of(cell), activation)


def bias_of(cell):
    return (None if cell.bias is None else as_array(cell.bias),)


def test_a_new_cell_is_the_plain_one_and_a_trained_one_the_equation(mode, plain):
    cell, activation = plain
    inputs = [normal(3, IN), normal(2, 1, 3, IN)]
    tensors = [Tensor(x) for x in inputs]
    expected = [y.asnumpy() for y in Each(cell)(*tensors)]
    new = AdaLoRADense.from_cell(cell, CONFIG)
    network = Each(new)
    for y, wanted in zip(network(*tensors), expected):
        np.testing.assert_array_equal(y.asnumpy(), wanted)
    assert 0.01 < new.mindpet_delta_lora_a.asnumpy().std() < 0.03 > new.mindpet_delta_lora_b.asnumpy().std() > 0.01
    randomize(new.lora_parameters(), seed=2)
    mask(new, [1])
    for x, y in zip(inputs, network(*tensors)):
        assert_close(y, oracle(new, x, activation))


def test_gradients_of_all_three(mode):
    cell = adapted(nn.Dense(IN, OUT, weight_init=Tensor(normal(OUT, IN))), masked=[3])
    x, weights = normal(6, IN, seed=5), normal(6, OUT, seed=6)
    a, b, values = (as_array(p) for p in cell.lora_parameters())
    low, back = x @ a.T, weights @ b
    found = gradients(cell, x, weights)[1:]
    assert_close(found[0], SCALE * values[:, None] * (back.T @ x))
    assert_close(found[1], SCALE * weights.T @ (low * values))
    # A masked triplet gets one too, and may come back.
    assert_close(found[2], SCALE * (low * back).sum(0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_it_is_saved_as_the_lora_of_the_ranks_that_are_left(dtype):
    cell = adapted(nn.Dense(IN, OUT), masked=[0, 2], param_init_type=dtype)
    a, b = cell.pair()
    parts = cell.saved_parts()
    assert {part: array.shape for part, array in parts.items()} == {"A": (2, IN), "B": (OUT, 2)}
    found = ALPHA / 2 * as_array(ms.Tensor(np.float32(parts["B"]))) @ np.float32(parts["A"])
    if dtype != "bfloat16":
        assert_close(found, SCALE * b @ a, dtype)
    mask(cell, range(RANK))
    assert cell.saved_parts() == {} and cell.rank_left == 0
    assert cell.saved_parts(keep_zeros=True)["A"].shape == (RANK, IN)


def test_merged_it_computes_the_same_and_unmerged_it_is_what_it_was():
    network = TinyModel()
    randomize(network.get_parameters(), seed=5)
    apply_lora(network, CONFIG)
    for number, (_, cell) in enumerate(lora_cells(network)):
        randomize(cell.lora_parameters(), seed=number)
        mask(cell, range(number))
    network.set_train(False)
    x = Tensor(normal(4, 6))
    expected, before = network(x).asnumpy(), snapshot(network)
    merge_lora(network, x)
    assert_close(network(x), expected)
    assert not any(cell.mindpet_delta_lora_lambda.asnumpy().any() for _, cell in lora_cells(network))
    unmerge_lora(network)
    assert snapshot(network) == before
    merge_and_unload(network, x)
    assert not list(lora_cells(network))
    assert_close(network(x), expected)


def test_only_its_three_parts_train_and_the_summary_counts_them():
    network = TinyModel()
    apply_lora(network, CONFIG)
    freeze_base(network)
    names = {p.name.rpartition(".")[2] for p in network.trainable_params()}
    assert names == {f"mindpet_delta_lora_{part}" for part in ("a", "b", "lambda")}
    assert "trainable params: 232 || all params: 916" in trainable_summary(network)


def test_its_health_has_the_ranks_that_are_left():
    def health(*masked):
        cell = adapted(nn.Dense(IN, OUT), masked=masked)
        return measure(60, {"wq": cell_values(cell, None, {}, {})}).cells["wq"], cell

    found, cell = health(1)
    a, b = cell.pair()
    values = np.linalg.svd(SCALE * b @ a, compute_uv=False)
    assert found.rank == 3 and found.zero_part == "lambda" and found.parts["lambda"].zeros == 0.25
    assert found.change_norm == pytest.approx(np.linalg.norm(values), rel=1e-5)
    found, _ = health(*range(RANK))
    assert (found.rank, found.effective_rank, found.change_norm) == (0, None, None)


@pytest.mark.parametrize(
    "network, kind",
    [
        (lambda: nn.SequentialCell(nn.Embedding(8, 4)), "embeddings"),
        (lambda: nn.SequentialCell(nn.Conv2d(3, 4, 1)), "convolutions"),
    ],
    ids=["embedding", "convolution"],
)
def test_other_cells_are_refused_by_name(network, kind):
    config = LoraConfig(use_adalora=True, target_modules=["0"])
    with pytest.raises(UnsupportedCellError, match=f"use_adalora is not supported on {kind}: "):
        apply_lora(network(), config)


def test_a_sharded_cell_is_refused(semi_auto_parallel, mindformers):
    cell = mindformers.modules.layers.Linear(IN * 2, OUT * 2)
    cell.shard(((1, 1), (2, 1)))
    with pytest.raises(UnsupportedCellError, match="use_adalora is not supported on sharded cells: the budget"):
        AdaLoRADense.from_cell(cell, CONFIG)
