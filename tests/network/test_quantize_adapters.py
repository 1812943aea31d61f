"""Adapters on a quantized base: saved, loaded and merged."""

import logging

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, load_lora, merge_and_unload, merge_lora, quantize_base, save_lora
from mindlora.core.errors import BaseMismatchError, MergeError
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.network.base_fingerprint import base_fingerprint
from mindlora.network.quantized.nf4 import nf4_array
from mindlora.network.tree import lora_cells
from tests.support.networks import TinyModel, as_array, snapshot
from tests.support.quantized_networks import FIELDS, kinds, network, plain, x
from tests.support.refusals import part, refused_unchanged


def test_an_adapter_goes_from_one_quantized_network_to_another(tmp_path, recwarn, caplog):
    source = network()
    save_lora(source, str(tmp_path / "adapter"))
    expected = source(x()).asnumpy()
    bare = plain()
    quantize_base(bare)
    for target in (network(adapter=5), bare):
        load_lora(target, str(tmp_path / "adapter"), on_base_mismatch="error")
        np.testing.assert_array_equal(target(x()).asnumpy(), expected)
    assert not recwarn.list and not caplog.records
    with pytest.raises(BaseMismatchError, match="other values"):
        load_lora(network(seed=7), str(tmp_path / "adapter"), on_base_mismatch="error")


def test_between_the_quantized_and_the_float_base_only_paths_and_shapes_are_compared(tmp_path, recwarn, caplog):
    in_float = plain()
    apply_lora(in_float, LoraConfig(**FIELDS))
    save_lora(network(), str(tmp_path / "of nf4"))
    save_lora(in_float, str(tmp_path / "of float"))
    for name, target, words in (
        ("of nf4", plain(), "nf4 and this one is in float"),
        ("of float", network(), "float and this one is in nf4"),
    ):
        caplog.clear()
        load_lora(target, str(tmp_path / name), on_base_mismatch="error")
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert record.getMessage() == (
            f"{tmp_path / name} was trained on a base in {words}: only paths and shapes were compared. Check that both "
            "are one model."
        )
    assert not recwarn.list
    other = TinyModel(3)
    apply_lora(other, LoraConfig(**{**FIELDS, "layers_to_transform": [0, 1, 2]}))
    assert base_fingerprint(other)["shapes"] != base_fingerprint(in_float)["shapes"]
    assert base_fingerprint(network())["shapes"] == base_fingerprint(in_float)["shapes"]


def test_base_and_adapter_in_one_checkpoint_load_again(tmp_path):
    source, target = network(), network(seed=7, adapter=8)
    ms.save_checkpoint(source, str(tmp_path / "all.ckpt"))
    ms.load_param_into_net(target, ms.load_checkpoint(str(tmp_path / "all.ckpt")), strict_load=True)
    assert snapshot(target) == snapshot(source)
    in_float = plain()
    with pytest.raises(RuntimeError):  # but not into a network that is not quantized
        ms.load_param_into_net(in_float, ms.load_checkpoint(str(tmp_path / "all.ckpt")))


def test_merging_in_place_is_refused_with_what_it_would_cost():
    model = network()
    model.set_train(False)
    with pytest.raises(MergeError) as caught:
        merge_lora(model)
    assert "have to be quantized again, with an error of" in str(caught.value)
    cells = [cell for _, cell in lora_cells(model)]
    change = [1.5 * as_array(b) @ as_array(a) for a, b in (cell.lora_parameters() for cell in cells)]
    merged = [(dequantize(nf4_array(cell)) + delta).astype(np.float32) for cell, delta in zip(cells, change)]
    error = np.concatenate([(dequantize(quantize(array)) - array).ravel() for array in merged])
    change = np.concatenate([delta.ravel() for delta in change])
    numbers = [f"{np.sqrt(np.mean(np.square(array))):.2g}" for array in (error, change)]
    assert f"an error of {numbers[0]} " in str(caught.value) and f"by {numbers[1]}." in str(caught.value)


def test_merge_and_unload_makes_float_cells_with_the_adapter_in_them(mode):
    model = network()
    model.set_train(False)
    expected = {
        path: dequantize(nf4_array(cell))
        + 1.5 * as_array(cell.mindpet_delta_lora_b) @ as_array(cell.mindpet_delta_lora_a)
        for path, cell in lora_cells(model)
    }
    before = model(x()).asnumpy()
    report = merge_and_unload(model, x())
    found = kinds(model)
    in_float = {path for path, kind in found.items() if kind == "Dense"}
    assert set(report.merged) == set(expected) == in_float - {"lm_head"}
    for path, cell in model.cells_and_names():
        if path in expected:
            np.testing.assert_allclose(cell.weight.asnumpy(), expected[path], rtol=1e-5, atol=1e-5)
            assert cell.weight.name == f"{path}.weight" and not cell.weight.requires_grad
    np.testing.assert_allclose(model(x()).asnumpy(), before, rtol=1e-3, atol=1e-3 * np.abs(before).max())


def test_a_merge_that_fails_leaves_the_quantized_network():
    model = network()
    model.set_train(False)
    cell = dict(lora_cells(model))["model.layers.1.feed_forward.w1"]
    cell.mindpet_delta_lora_b.set_data(Tensor(np.full((9, 2), np.nan, np.float32)))
    refused_unchanged(
        model, MergeError, part("holds NaN or infinity, so nothing was merged"), lambda: merge_and_unload(model)
    )
    assert not any(hasattr(cell._adopted[0].emptied_cell, "weight") for _, cell in lora_cells(model))
