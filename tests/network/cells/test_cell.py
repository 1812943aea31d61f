"""The initial values of A and B for each initializer that a configuration names."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters

from mindlora import LoraConfig, LoRADense
from mindlora.core.errors import UnsupportedCellError
from mindlora.network.cells.conv import LoRAConv2d
from mindlora.network.cells.embedding import LoRAEmbedding
from tests.support import networks

IN, OUT, RANK = 400, 300, 8


def pair(**fields):
    """Returns A and B of a new cell as arrays."""
    cell = LoRADense.from_dense(nn.Dense(IN, OUT), LoraConfig(lora_rank=RANK, **fields))
    return [networks.as_array(parameter) for parameter in cell.lora_parameters()]


@pytest.mark.parametrize("name", [None, "kaiming", "pissa", "pissa_niter_4", "olora"])
def test_the_plain_initialization(name):
    """Initializers that need the base start from the default values."""
    a, b = pair(lora_init=name)
    bound = 1 / np.sqrt(IN)
    assert 0.99 * bound < np.abs(a).max() <= bound
    np.testing.assert_allclose(a.std(), bound / np.sqrt(3), rtol=0.05)
    assert not b.any()


def test_gaussian():
    a, b = pair(lora_init="gaussian")
    np.testing.assert_allclose([a.mean(), a.std()], [0, 1 / RANK], atol=0.01)
    # A tenth of a normal distribution lies beyond 1.645 standard deviations, but only a twentieth of a uniform one.
    assert abs((np.abs(a) > 1.645 / RANK).mean() - 0.1) < 0.02
    assert not b.any()


def test_gaussian_for_a_convolution():
    cell = LoRAConv2d.from_cell(nn.Conv2d(40, 50, 3), LoraConfig(lora_rank=RANK, lora_init="gaussian"))
    a, b = map(networks.as_array, cell.lora_parameters())
    np.testing.assert_allclose([a.mean(), a.std()], [0, 1 / RANK], atol=0.01)
    assert not b.any()


@pytest.mark.parametrize("init", ["orthogonal", "pissa", "olora"])
@pytest.mark.parametrize(
    "kind, cell", [(LoRAConv2d, lambda: nn.Conv2d(4, 5, 3)), (LoRAEmbedding, lambda: nn.Embedding(9, 4))]
)
def test_initializers_for_linear_cells_alone(kind, cell, init):
    message = f"^lora_init '{init}' is not supported on {kind.layout.cells}: it needs the whole weight of a linear cell"
    with pytest.raises(UnsupportedCellError, match=message):
        kind.from_cell(cell(), LoraConfig(lora_rank=2, lora_init=init))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_orthogonal(dtype):
    a, b = pair(lora_init="orthogonal", param_init_type=dtype)
    np.testing.assert_allclose([a.std(), b.std()], 0.1 * np.sqrt(0.5), rtol=0.1)
    np.testing.assert_allclose(b @ a, 0, atol={"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}[dtype])


@pytest.mark.parametrize("name", ["kaiming", "gaussian", "orthogonal"])
def test_the_seed_fixes_it(name):
    ms.set_seed(5)
    first, other = pair(lora_init=name), pair(lora_init=name)
    ms.set_seed(5)
    again = pair(lora_init=name)
    ms.set_seed(6)
    for one, same, differs in zip(first, again, pair(lora_init=name)):
        np.testing.assert_array_equal(one, same)
        assert not one.any() or (one != differs).any()
    assert (first[0] != other[0]).any()


def test_an_initializer_of_a_or_b_alone():
    a, b = pair(lora_a_init="ones")
    assert (a == 1).all() and not b.any()
    a, b = pair(lora_b_init=Tensor(np.full((OUT, RANK), 2, np.float32)))
    assert 0 < np.abs(a).max() <= 1 / np.sqrt(IN) and (b == 2).all()


def test_by_the_constructor():
    a, _ = LoRADense(IN, OUT, RANK, 16, lora_init="gaussian").lora_parameters()
    np.testing.assert_allclose(a.asnumpy().std(), 1 / RANK, rtol=0.1)


@pytest.mark.parametrize("name", ["kaiming", "gaussian"])
def test_values_wait_where_mindspore_delays_them(name):
    with no_init_parameters():
        cell = LoRADense.from_dense(nn.Dense(IN, OUT), LoraConfig(lora_rank=RANK, lora_init=name))
    assert all(parameter.has_init for parameter in cell.lora_parameters())
    cell.init_parameters_data()
    assert cell.mindpet_delta_lora_a.asnumpy().std() > 0


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_a_takes_no_gradient(frozen, mode):
    cell = LoRADense(6, 5, 2, 4, lora_b_init="ones", freeze_lora_a=frozen)
    a, b = cell.lora_parameters()
    cell.weight.requires_grad = cell.bias.requires_grad = False
    assert cell.trained_parameters() == ((b,) if frozen else (a, b))
    assert cell.trainable_params() == list(cell.trained_parameters())
    x, weights = (np.random.default_rng(1).normal(size=(3, size)).astype(np.float32) for size in (6, 5))
    gradients = ms.grad(networks.WeightedSum(cell), None, cell.trainable_params())(Tensor(x), Tensor(weights))
    assert len(gradients) == (1 if frozen else 2)
    expected = cell.scale * weights.T @ (x @ a.asnumpy().T)
    np.testing.assert_allclose(gradients[-1].asnumpy(), expected, atol=1e-4)
