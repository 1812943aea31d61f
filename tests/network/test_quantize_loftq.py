"""LoftQ: adapters that make up for the error of quantizing the base."""

import dataclasses

import numpy as np
import pytest

from mindlora import LoraConfig, apply_lora, load_lora, save_lora
from mindlora.core.errors import BaseMismatchError, LoraError
from mindlora.core.numerics.initializers import loftq
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.network.base_fingerprint import base_fingerprint
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.tree import lora_cells
from tests.support.networks import TinyModel, adapters, as_array, randomize, snapshot
from tests.support.quantized_networks import FIELDS, plain

LOFTQ = LoraConfig(**{**FIELDS, "rank_pattern": {"w1": 3}}, quantize_base="nf4", lora_init="loftq")


def test_loftq_comes_nearer_to_the_base_in_float():
    model, weights = plain(), {p.name: p.asnumpy().copy() for p in plain().get_parameters()}
    apply_lora(model, LOFTQ)
    for path, cell in lora_cells(model):
        weight, (a, b) = weights[f"{path}.weight"], cell.lora_parameters()
        residual = weight - dequantize(quantize(weight))
        np.testing.assert_array_equal(cell.weight.asnumpy(), quantize(weight).codes)
        # With one iteration, the adapter is the quantization error, reduced to its rank.
        u, s, vt = np.linalg.svd(residual, full_matrices=False)
        rank = cell.lora_rank
        assert rank == (3 if path.endswith("w1") else 2)
        np.testing.assert_allclose(
            cell.scale * as_array(b) @ as_array(a), (u[:, :rank] * s[:rank]) @ vt[:rank], atol=1e-5
        )


@pytest.mark.parametrize("name, turns", [("loftq_iter_1", 1), ("loftq_iter_4", 4)])
def test_several_iterations_of_loftq(name, turns):
    model, weights = plain(), {p.name: p.asnumpy().copy() for p in plain().get_parameters()}
    apply_lora(model, LoraConfig(**FIELDS, quantize_base="nf4", lora_init=name))
    for path, cell in lora_cells(model):
        array, a, b = loftq(weights[f"{path}.weight"], 2, quantize, dequantize, turns, 1.5)
        np.testing.assert_array_equal(cell.weight.asnumpy(), array.codes)
        for parameter, expected in zip(cell.lora_parameters(), (a, b)):
            np.testing.assert_array_equal(as_array(parameter), expected)
    assert base_fingerprint(model)["quantization"] == "loftq"


def test_doras_magnitudes_begin_as_the_norms_of_what_loftq_makes():
    model, lora = plain(), plain()
    apply_lora(model, dataclasses.replace(LOFTQ, use_dora=True))
    apply_lora(lora, LOFTQ)
    for (path, cell), (_, other) in zip(lora_cells(model.set_train()), lora_cells(lora)):
        (a, b), parts = map(as_array, other.lora_parameters()), {k: as_array(p) for k, p in cell.parts().items()}
        np.testing.assert_array_equal(parts["A"], a, err_msg=path)
        whole = as_array(cell.by_rows()[:]) + cell.scale * b @ a
        np.testing.assert_allclose(parts["magnitude"], np.linalg.norm(whole, axis=1), rtol=1e-5, err_msg=path)


def test_an_adapter_from_loftq_is_for_its_own_base_alone(tmp_path):
    source = plain()
    apply_lora(source, LOFTQ)
    save_lora(source, str(tmp_path / "adapter"))
    again = plain()
    apply_lora(again, LOFTQ)
    randomize(adapters(again).values(), 9)
    load_lora(again, str(tmp_path / "adapter"), on_base_mismatch="error")
    assert snapshot(again) == snapshot(source)
    with pytest.raises(BaseMismatchError, match="LoftQ changed the base"):
        load_lora(plain(), str(tmp_path / "adapter"), on_base_mismatch="error")


def test_loftq_needs_the_weights_in_float():
    from mindspore.nn.utils import no_init_parameters

    with no_init_parameters():
        model = TinyModel()
    with pytest.raises(LoraError, match="lora_init 'loftq' is computed from the base's weights in float, which h"):
        apply_lora(model, LOFTQ)
    assert not any(isinstance(cell, NF4Dense) for _, cell in model.cells_and_names())
    for name in ("loftq", "loftq_iter_4"):  # What pet_config with adapter_path puts on the network
        assert dataclasses.replace(LOFTQ, lora_init=name).as_saved() == dataclasses.replace(LOFTQ, lora_init=None)
