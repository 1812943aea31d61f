"""NF4Dense and QLoRADense against numpy on the dequantized weight: equation, gradients, memory, inherited settings."""

import functools
import os
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters

from mindlora import LoraConfig, LoRADense
from mindlora.core.errors import QuantizationError, UnsupportedCellError
from mindlora.core.numerics.nf4 import TENSOR_NAMES, dequantize, quantize
from mindlora.network.merge import in_float, sample
from mindlora.network.quantized.nf4 import NF4Dense, QLoRADense, nf4_array
from tests.conftest import ROOT
from tests.support.lora_dense import Each
from tests.support.networks import (
    as_array,
    assert_close,
    gradients,
    linear_cell,
    lora_forward,
    normal,
    normal_dense,
    randomize,
)
from tests.support.refusals import part, refused

IN, OUT, RANK, ALPHA = 70, 5, 3, 4.5
SCALE = ALPHA / RANK
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
dense = functools.partial(normal_dense, IN, OUT)


@pytest.fixture(params=["dense", "dense with relu", "linear with silu"])
def plain(request, mindformers):
    """A linear cell with normal weights, and its activation in numpy."""
    return linear_cell(request.param, IN, OUT, mindformers)


def adapted(cell, config=CONFIG):
    """Returns a QLoRADense over ``cell`` whose A and B are normal."""
    lora = QLoRADense.from_cell(NF4Dense.from_dense(cell), config)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def oracle(lora, x, activation=None):
    a, b = (as_array(p) for p in lora.lora_parameters())
    return lora_forward(
        x, dequantize(nf4_array(lora)), a, b, SCALE, None if lora.bias is None else as_array(lora.bias), activation
    )


# The equation ---------------------------------------------------------------------------------------------------


def test_forward_is_the_equation_on_the_dequantized_weight(mode, plain):
    cell, activation = plain
    decoded, bias = dequantize(quantize(cell.weight.asnumpy())), None if cell.bias is None else as_array(cell.bias)
    nf4, inputs = NF4Dense.from_dense(cell), [normal(3, IN), normal(2, 1, 3, IN)]
    tensors = [Tensor(x) for x in inputs]
    plain_outputs = Each(nf4)(*tensors)
    for x, y in zip(inputs, plain_outputs):
        assert_close(y, lora_forward(x, decoded, np.zeros((1, IN)), np.zeros((OUT, 1)), 1, bias, activation))
    lora = QLoRADense.from_cell(nf4, CONFIG)
    network = Each(lora)
    for training in (True, False):
        for y, expected in zip(network.set_train(training)(*tensors), plain_outputs):
            np.testing.assert_array_equal(y.asnumpy(), expected.asnumpy())  # B is zero
    randomize(lora.lora_parameters(), seed=2)
    for training in (True, False):
        for x, y in zip(inputs, network.set_train(training)(*tensors)):
            assert_close(y, oracle(lora, x, activation))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_computes_in_the_dtype_of_the_plain_cell(mode, dtype):
    x, cell = normal(3, IN), dense(dtype=getattr(ms, dtype), has_bias=False)
    nf4 = NF4Dense.from_dense(cell)
    lora = QLoRADense.from_cell(nf4, CONFIG)
    randomize(lora.lora_parameters(), seed=2)
    # A CPU has no bfloat16 product with A and B, except for the fused one in graph mode.
    for made in (nf4, lora) if dtype == "float16" or mode == ms.GRAPH_MODE else (nf4,):
        y = made(Tensor(x, getattr(ms, dtype)))
        assert str(y.dtype).lower() == dtype == str(made.dtype).lower()
        if made is nf4:
            assert_close(y.astype(ms.float32), x @ dequantize(nf4_array(nf4)).T.astype(np.float64), dtype)
        else:
            assert_close(y.astype(ms.float32), oracle(lora, x), dtype)


def test_mindformers_linear_has_a_dtype_of_its_own(mindformers):
    cell = mindformers.modules.layers.Linear(IN, OUT, compute_dtype=ms.float16, has_bias=False)
    assert (cell.weight.dtype, NF4Dense.from_dense(cell).dtype) == (ms.float32, ms.float16)


@pytest.mark.parametrize("param_init_type", ["float32", "bfloat16"])
def test_gradients_reach_x_a_and_b_and_nothing_else(mode, param_init_type):
    config = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, param_init_type=param_init_type)
    lora = adapted(dense(), config)
    lora.bias.requires_grad = False
    lora.set_train()
    x, weights = normal(4, IN), normal(4, OUT, seed=4)
    assert [p.name for p in lora.trainable_params()] == [p.name for p in lora.lora_parameters()]
    dx, da, db = gradients(lora, x, weights)
    a, b = (as_array(p) for p in lora.lora_parameters())
    w = dequantize(nf4_array(lora)).astype(np.float64) + SCALE * b @ a
    assert_close(dx, weights @ w)
    assert_close(da.astype(ms.float32), SCALE * (weights @ b).T @ x, param_init_type)
    assert_close(db.astype(ms.float32), SCALE * weights.T @ (x @ a.T), param_init_type)


def test_dropout_drops_on_the_low_rank_path_alone(mode):
    lora = adapted(dense(), LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_dropout=0.9))
    lora.set_train()
    x = Tensor(np.ones((64, IN), np.float32))
    first = lora(x).asnumpy()
    lora.mindpet_delta_lora_b.set_data(Tensor(np.zeros((OUT, RANK), np.float32)))
    still = lora(x).asnumpy()
    assert np.ptp(first, axis=0).min() > 0 and np.ptp(still, axis=0).max() < 1e-4


# What it holds --------------------------------------------------------------------------------------------------


def test_its_parameters_are_those_of_quantize_under_the_name_of_the_cell():
    cell = dense()
    weight, bias = cell.weight.asnumpy().copy(), cell.bias
    nf4, array = NF4Dense.from_dense(cell, "layers.0.wq"), quantize(weight)
    for field, name in TENSOR_NAMES.items():
        parameter = getattr(nf4, name)
        np.testing.assert_array_equal(parameter.asnumpy(), getattr(array, field))
        assert parameter.name == f"layers.0.wq.{name}" and not parameter.requires_grad
    assert nf4.bias is bias
    assert {p.name for p in nf4.get_parameters()} == {bias.name} | {f"layers.0.wq.{n}" for n in TENSOR_NAMES.values()}
    assert not hasattr(cell, "weight")  # nothing holds it


def test_a_weight_takes_4_13_bits():
    nf4 = NF4Dense.from_dense(nn.Dense(512, 256, has_bias=False))
    nbytes = sum(p.asnumpy().nbytes for p in nf4.get_parameters())
    assert 8 * nbytes / (512 * 256) <= 4.13


MEMORY = """
import ctypes, gc, os, sys
import numpy as np, mindspore as ms
from mindspore import Tensor, nn
from mindlora import LoraConfig, apply_lora, freeze_base
SIZE, CELLS = 2048, 12

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def network(cells, size, quantize):
    made = nn.SequentialCell([nn.Dense(size, size, has_bias=False) for _ in range(cells)])
    apply_lora(made, LoraConfig(lora_rank=2, target_modules="all-linear", quantize_base=quantize))
    freeze_base(made)
    return made

def step(made, x):
    made.set_train()
    loss, grads = ms.value_and_grad(made, None, made.trainable_params())(x)
    return float(loss.asnumpy().sum())

step(network(2, 64, "nf4"), Tensor(np.ones((1, 64), np.float32)))  # what the first run costs
before = resident()
made = network(CELLS, SIZE, "nf4")
for _ in range(2):
    step(made, Tensor(np.ones((1, SIZE), np.float32)))
print((resident() - before) / (CELLS * SIZE * SIZE))
"""


def test_no_weight_in_float_stays_in_the_process(tmp_path):
    script = tmp_path / "memory.py"  # in graph mode the source must be a file
    script.write_text(MEMORY)
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    bytes_a_weight = float(run.stdout.split()[-1])
    print(f"{bytes_a_weight:.3f} bytes a weight after two steps (float32: 4)")
    assert bytes_a_weight < 0.8


def test_where_weights_are_still_to_be_loaded_so_are_the_quantized_ones():
    with no_init_parameters():
        nf4 = NF4Dense.from_dense(nn.Dense(IN, OUT, has_bias=False), "wq")
        assert all(p.has_init for p in nf4.get_parameters())
    source = NF4Dense.from_dense(dense(has_bias=False), "wq")
    unset = nf4(Tensor(normal(2, IN))).asnumpy()
    assert np.isnan(unset).all()  # so that it is not mistaken for a base
    ms.load_param_into_net(nf4, {p.name: p for p in source.get_parameters()}, strict_load=True)
    x = Tensor(normal(2, IN))
    np.testing.assert_array_equal(nf4(x).asnumpy(), source(x).asnumpy())


def test_settings_of_the_plain_cell_are_kept():
    cell = dense()
    cell.recompute()
    cell.set_train()
    lora = adapted(cell)
    assert "recompute" in lora.get_scope() and lora.training
    nf4 = NF4Dense.from_dense(dense()).set_train()
    assert nf4.plain_cell().training
    assert "quantization=nf4" in str(lora) and f"in_channels={IN}" in str(NF4Dense.from_dense(dense()))


def test_back_in_float_it_is_the_dequantized_cell(plain):
    cell, _ = plain
    lora = adapted(cell)
    x = normal(3, IN)
    expected = lora(Tensor(x)).asnumpy()
    back = in_float(lora)
    assert type(back) is LoRADense and back.lora_parameters() == lora.lora_parameters()
    np.testing.assert_array_equal(back.weight.asnumpy(), dequantize(nf4_array(lora)))
    assert_close(back(Tensor(x)), expected.astype(np.float64))
    lora.base_cell.drop_float()
    assert not hasattr(cell, "weight")


def test_back_in_float_all_is_as_it_was():
    cell = dense(dtype=ms.float16, has_bias=False)
    config = LoraConfig(lora_rank=4, lora_alpha=6, use_rslora=True, freeze_lora_a=True, lora_dropout=0.25)
    lora = adapted(cell.set_train(), config)
    lora.recompute()
    back = in_float(lora)
    assert back.weight.dtype == back.dtype == ms.float16 and not back.weight.requires_grad
    assert (back.scale, back.freeze_lora_a, back.dropout_rate) == (3, True, 0.25)
    assert back.training and "recompute" in back.get_scope()


@pytest.mark.parametrize("rows", [1, 128, 200, 300, 999])
def test_the_first_rows_of_a_weight_and_of_its_change(rows):
    """200 rows of two blocks are more than one group of blocks."""
    cell = nn.Dense(IN, 300, has_bias=False)
    randomize(cell.get_parameters(), seed=1)
    lora = adapted(cell)
    weight, change = sample(lora, rows)
    np.testing.assert_array_equal(weight, dequantize(nf4_array(lora))[:rows])
    a, b = (as_array(p) for p in lora.lora_parameters())
    assert_close(change, (SCALE * b @ a)[:rows])


# What is refused ------------------------------------------------------------------------------------------------


class Own(nn.Dense):
    def construct(self, x):
        return x


def test_cells_that_cannot_be_quantized(mindformers):
    linear = mindformers.modules.layers.Linear
    sharded = linear(IN, OUT)
    sharded.matmul.in_strategy = ((1, 1), (2, 1))
    nan = dense()
    nan.weight.set_data(Tensor(np.full((OUT, IN), np.nan, np.float32)))
    for cell, error, message in (
        (
            nn.ReLU(),
            UnsupportedCellError,
            "ReLU is none of nn.Dense, mint.nn.Linear and MindFormers' Linear: pass one of these.",
        ),
        (Own(IN, OUT), UnsupportedCellError, "Own has a forward of its own"),
        (linear(IN, OUT, expert_num=2), UnsupportedCellError, "Linear holds 2 experts"),
        (linear(IN, OUT, transpose_b=False), UnsupportedCellError, "keeps its weight as [in_channels, out"),
        (sharded, UnsupportedCellError, "The cell is sharded, but NF4 weights are not supported there."),
        (LoRADense.from_dense(dense(), CONFIG), UnsupportedCellError, "adapters do not stack"),
        (nan, QuantizationError, "The weight of the cell holds infinity, NaN"),
    ):
        refused(error, part(message), NF4Dense.from_dense, cell)
        assert not hasattr(cell, "out_channels") or hasattr(cell, "weight")


def test_an_initializer_that_needs_the_weight_in_float():
    nf4 = NF4Dense.from_dense(dense())
    message = part("lora_init 'pissa' is not supported on quantized weights: it needs the weight in float")
    refused(UnsupportedCellError, message, QLoRADense.from_cell, nf4, LoraConfig(lora_rank=2, lora_init="pissa"))
