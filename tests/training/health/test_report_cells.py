"""What is measured on each kind of cell, against the whole scale B A of the cell in NumPy."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from mindlora import LoraConfig, apply_lora, freeze_base, initialize_adapters
from mindlora.core.numerics.dtypes import to_float32
from mindlora.network.quantized.nf4 import first_rows
from mindlora.network.tensors import to_array
from mindlora.network.tree import lora_cells, weight_of
from mindlora.training.health.adapter_health import cell_values, float_parts, measure, weight_norm
from tests.support import initialized_networks, quantized_networks
from tests.support.networks import randomize

FIELDS = {"lora_rank": 3, "lora_alpha": 4, "target_modules": ["cell"]}


class Only(nn.Cell):
    """A network of one cell."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell


def adapted(cell, **fields):
    """The cell with an adapter in which nothing is zero."""
    network = Only(cell)
    randomize(network.get_parameters(), seed=1)
    apply_lora(network, LoraConfig(**{**FIELDS, **fields}))
    freeze_base(network)
    ((_, lora),) = lora_cells(network)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def health(cell, before=None, gradient_norms=None):
    values = cell_values(cell, weight_norm(cell), before or {}, gradient_norms or {})
    return measure(1, {"cell": values}).cells["cell"]


def as_float64(parameter):
    return to_float32(to_array(parameter)).astype(np.float64)


def assert_change(found, change, weight, rank=3):
    """Asserts effective rank and change of a cell, from the change of its weight and the weight, both as matrices."""
    singular = np.linalg.svd(change, compute_uv=False)
    shares = singular[singular > 0] / singular.sum()
    np.testing.assert_allclose(found.effective_rank, np.exp(-(shares * np.log(shares)).sum()), rtol=1e-6)
    np.testing.assert_allclose(found.change, np.linalg.norm(change) / np.linalg.norm(weight), rtol=1e-5)
    assert found.rank == rank


def of_linear(cell):
    a, b = as_float64(cell.mindpet_delta_lora_a), as_float64(cell.mindpet_delta_lora_b)
    return cell.scale * b.reshape(len(b), -1) @ a.reshape(len(a), -1)


@pytest.mark.parametrize("fields", [{}, {"use_dora": True}, {"use_rslora": True}, {"freeze_lora_a": True}])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_linear(fields, dtype):
    cell = adapted(nn.Dense(11, 7), param_init_type=dtype, **fields)
    found = health(cell, gradient_norms={p.name: 2.0 for p in cell.trained_parameters()})
    assert_change(found, of_linear(cell), as_float64(cell.weight))
    assert list(found.parts) == list(cell.parts()) and found.zero_part == "B"
    for name, part in found.parts.items():
        np.testing.assert_allclose(part.norm, np.linalg.norm(as_float64(cell.parts()[name])), rtol=1e-5)
        trains = name != "A" or not fields.get("freeze_lora_a")
        assert part.gradient_norm == (2.0 if trains else None)


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_weight_in_half_precision(dtype):
    cell = adapted(nn.Dense(11, 7, dtype=dtype))
    assert_change(health(cell), of_linear(cell), as_float64(cell.weight))


def test_embedding():
    cell = adapted(nn.Embedding(13, 6))
    found = health(cell)
    assert_change(found, of_linear(cell), as_float64(weight_of(cell)))
    assert found.zero_part == "A"


def test_of_mica_a_is_zero_at_first():
    assert health(adapted(nn.Dense(11, 7), lora_init="mica")).zero_part == "A"


def test_convolution():
    cell = adapted(nn.Conv2d(4, 5, 3))
    assert_change(health(cell), of_linear(cell), as_float64(cell.weight).reshape(5, -1))


def test_convolution_with_groups_has_no_one_product():
    found = health(adapted(nn.Conv2d(6, 9, 3, group=3)))
    assert found.effective_rank is found.change_norm is found.change is None
    assert found.rank == 3 and set(found.parts) == {"A", "B"}


def test_vera_has_vectors_alone():
    found = health(adapted(nn.Dense(11, 7), use_vera=True, lora_alpha=3))
    assert list(found.parts) == ["lambda_d", "lambda_b"] and found.zero_part == "lambda_b"
    assert found.effective_rank is found.change is None and found.rank == 3


def test_quantized():
    network = quantized_networks.network()
    for _, cell in lora_cells(network):
        weight = first_rows(cell, cell.out_channels)
        assert_change(health(cell), of_linear(cell), weight, rank=2)


def test_initializer_that_changes_the_base():
    """The change is that of the base as it was loaded, and |W| is the base's."""
    network, base = initialized_networks.base(), initialized_networks.base()
    apply_lora(network, initialized_networks.config())
    initialize_adapters(network)
    weights = {path: cell for path, cell in base.cells_and_names() if isinstance(cell, nn.Dense)}
    for path, cell in lora_cells(network):
        assert health(cell).change_norm == 0
        a0, b0 = (as_float64(p) for p in cell.lora_parameters())
        randomize(cell.lora_parameters(), seed=5)
        change = of_linear(cell) - cell.scale * b0 @ a0
        assert_change(health(cell), change, as_float64(weights[path].weight), rank=6)


def test_update_of_the_parts_that_train():
    cell = adapted(nn.Dense(11, 7), freeze_lora_a=True)
    before = {name: part.copy() for name, part in float_parts(cell, trained=True).items()}
    assert list(before) == ["B"]
    randomize(cell.trained_parameters(), seed=6)
    parts = health(cell, before).parts
    expected = np.linalg.norm(as_float64(cell.mindpet_delta_lora_b) - before["B"]) / np.linalg.norm(before["B"])
    np.testing.assert_allclose(parts["B"].update, expected, rtol=1e-6)
    assert parts["A"].update is None


def test_norm_of_a_large_weight_is_estimated():
    cell = adapted(nn.Dense(5, 1000))
    np.testing.assert_allclose(weight_norm(cell), np.linalg.norm(as_float64(cell.weight)), rtol=0.05)
