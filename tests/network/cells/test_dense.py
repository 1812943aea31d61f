"""LoRADense against numpy: its equation, in every dtype."""

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense
from tests.support.lora_dense import ALPHA, CONFIG, EACH_CELL, IN, OUT, RANK, Each, adapted, oracle
from tests.support.networks import as_array, assert_close, gradients, normal, normal_dense, randomize

# The equation ---------------------------------------------------------------------------------------------------


@EACH_CELL
def test_a_new_cell_is_the_plain_one_and_a_trained_one_the_equation(mode, plain):
    cell, activation = plain
    lora = LoRADense.from_dense(cell, CONFIG)
    inputs = [normal(*shape) for shape in ((3, IN), (1, 3, IN), (2, 1, 3, IN))]
    tensors = [Tensor(x) for x in inputs]
    for new, base in zip(Each(lora).set_train()(*tensors), Each(cell).set_train()(*tensors)):
        np.testing.assert_array_equal(new.asnumpy(), base.asnumpy())  # B is zero
    randomize(lora.lora_parameters(), seed=2)
    for x, y in zip(inputs, Each(lora).set_train(False)(*tensors)):
        assert y.shape == (*x.shape[:-1], OUT)
        assert_close(y, oracle(lora, x, activation))


@pytest.mark.parametrize("in_channels, out_channels, rank", [(1, 1, 1), (1, 5, 3), (13, 1, 2), (8, 8, 8), (3, 4, 17)])
def test_odd_sizes(mode, in_channels, out_channels, rank):
    lora = LoRADense(in_channels, out_channels, rank, 2)
    randomize(lora.get_parameters())
    x = normal(3, in_channels)
    assert_close(lora(Tensor(x)), oracle(lora, x))


def test_a_new_cell_and_an_adapted_one_are_the_same():
    dense = nn.Dense(IN, OUT, activation="relu")
    lora, new = adapted(dense), LoRADense(IN, OUT, RANK, ALPHA, activation="relu")
    for mine, theirs in zip(new.get_parameters(), lora.get_parameters()):
        assert mine.name == theirs.name
        mine.set_data(theirs.value())
    x = Tensor(normal(3, IN))
    np.testing.assert_array_equal(new(x).asnumpy(), lora(x).asnumpy())


def test_a_copy_is_a_cell_of_its_own():
    lora = adapted(nn.Dense(IN, OUT))
    twin = copy.deepcopy(lora)
    x = normal(3, IN)
    before = twin(Tensor(x)).asnumpy()
    randomize(lora.lora_parameters(), seed=9)
    np.testing.assert_array_equal(twin(Tensor(x)).asnumpy(), before)
    assert_close(lora(Tensor(x)), oracle(lora, x))


def test_a_call_of_a_compiled_network_does_not_visit_the_cells_below(graph_mode, monkeypatch):
    """MindSpore sets an attribute of each cell at every call, which took longer than a small product."""
    lora, visited = adapted(nn.Dense(IN, OUT)), []
    network = nn.SequentialCell(lora)
    original = nn.Cell.__setattr__
    monkeypatch.setattr(nn.Cell, "__setattr__", lambda cell, *item: visited.append(cell) or original(cell, *item))
    below = {id(cell) for _, cell in lora.cells_and_names()} - {id(lora)}
    found = []
    for x in (normal(3, IN), normal(3, IN), normal(4, IN)):
        visited.clear()
        assert_close(network(Tensor(x)), oracle(lora, x))
        found.append(sum(id(cell) in below for cell in visited) > 0)
    assert found == [True, False, True]  # compiled, called again, compiled for another shape


def test_repr_tells_the_adapter():
    text = repr(LoRADense(IN, OUT, RANK, ALPHA, 0.1, has_bias=False))
    assert (
        "in_channels=7, out_channels=5, has_bias=False, lora_rank=3, lora_alpha=4.5, lora_dropout=0.1, "
        "compute_dtype=Float32"
    ) in text


# dtypes ---------------------------------------------------------------------------------------------------------
# A CPU has no kernel for bfloat16 products (neither MatMul nor Mul), so no test computes in bfloat16. A, B and W can be
# stored in it and cast to the dtype of the products.


@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "weight_dtype, input_dtype, compute_dtype",
    [
        ("float32", "float32", None),
        ("float16", "float16", None),
        ("float16", "float32", None),
        ("float32", "float32", "float16"),
        ("float16", "float16", "float32"),
        ("bfloat16", "bfloat16", "float32"),
    ],
)
def test_every_dtype_that_a_cpu_has(mode, param_init_type, weight_dtype, input_dtype, compute_dtype):
    config = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, param_init_type=param_init_type, compute_dtype=compute_dtype)
    lora = adapted(normal_dense(IN, OUT, dtype=getattr(ms, weight_dtype)), config)
    x = Tensor(normal(2, 3, IN), getattr(ms, input_dtype))
    y = lora(x)
    assert y.dtype == x.dtype
    computed = compute_dtype or weight_dtype
    # The oracle uses the rounded parameters, so only the rounding of the products and of y remains.
    assert_close(
        y, oracle(lora, as_array(x)), max((computed, input_dtype), key=["float32", "float16", "bfloat16"].index)
    )


@pytest.mark.parametrize(
    "kind, cell_dtype, compute_dtype, overflows",
    [
        ("Dense", "float16", None, True),
        ("Dense", "float16", "float32", False),
        ("Dense", "float32", None, False),
        ("Dense", "float32", "float16", True),
        ("Linear", "float16", None, True),
        ("Linear", "float16", "float32", False),
        ("Linear", "float32", None, False),
        ("Linear", "float32", "float16", True),
    ],
)
def test_compute_dtype_is_the_cell_s_own_unless_it_is_given(mindformers, kind, cell_dtype, compute_dtype, overflows):
    if kind == "Dense":
        cell = nn.Dense(IN, OUT, weight_init="ones", dtype=getattr(ms, cell_dtype))
    else:
        # MindFormers' Linear keeps float32 and computes in another dtype.
        cell = mindformers.modules.layers.Linear(IN, OUT, weight_init="ones", compute_dtype=getattr(ms, cell_dtype))
    lora = LoRADense.from_dense(cell, LoraConfig(compute_dtype=compute_dtype))
    y = lora(Tensor(np.full((1, IN), 1e5, np.float32))).asnumpy()  # float16 ends at 65504
    assert np.isfinite(y).all() != overflows


def test_bfloat16_is_inherited_too():
    assert "compute_dtype=BFloat16" in repr(LoRADense.from_dense(nn.Dense(IN, OUT, dtype=ms.bfloat16), CONFIG))


@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
def test_a_and_b_and_their_gradients_are_in_param_init_type(mode, param_init_type):
    lora = LoRADense(IN, OUT, RANK, ALPHA, param_init_type=param_init_type, compute_dtype="float32", dtype=ms.float16)
    _, *of_adapter = gradients(lora, normal(3, IN), normal(3, OUT))
    assert [p.dtype for p in lora.lora_parameters()] == [getattr(ms, param_init_type)] * 2
    assert [gradient.dtype for gradient in of_adapter] == [getattr(ms, param_init_type)] * 2
    assert lora.weight.dtype == ms.float16 and lora.bias.dtype == ms.float16
