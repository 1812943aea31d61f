"""A quantized network: what quantize_base and apply_lora quantize, adapters saved and loaded, merging, LoftQ."""

import dataclasses
import logging

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import (
    LoraConfig,
    LoRADense,
    apply_lora,
    freeze_base,
    load_lora,
    merge_and_unload,
    merge_lora,
    quantize_base,
    save_lora,
    trainable_summary,
)
from mindlora.errors import (
    BaseMismatchError,
    ConfigError,
    LoraError,
    MergeError,
    QuantizationError,
    TargetError,
    UnsupportedCellError,
)
from mindlora.nn.fingerprint import base_fingerprint
from mindlora.nn.nf4 import NF4Dense, nf4_array
from mindlora.nn.qlora import QLoRADense
from mindlora.nn.tree import lora_cells
from mindlora.numerics.initializers import loftq
from mindlora.numerics.nf4 import dequantize, quantize
from tests.support.networks import TinyModel, adapters, as_array, randomize, snapshot

FIELDS = {"lora_rank": 2, "lora_alpha": 3, "target_modules": ["wq", "w1"]}
QLORA = LoraConfig(**FIELDS, quantize_base="nf4")


def plain(seed=1):
    result = TinyModel()
    randomize(result.get_parameters(), seed)
    return result


def network(config=QLORA, seed=1, adapter=2):
    """Returns a quantized network whose base and adapters are normal, told by their seeds."""
    result = plain(seed)
    apply_lora(result, config)
    freeze_base(result)
    randomize(adapters(result).values(), adapter)
    return result


def kinds(model):
    """Returns path -> class name of the linear cells."""
    return {
        path: type(cell).__name__
        for path, cell in model.cells_and_names()
        if isinstance(cell, (nn.Dense, NF4Dense, LoRADense))
    }


def x():
    return Tensor(np.random.default_rng(3).normal(size=(2, 3, 6)).astype(np.float32) / 8)


def refused(call, target, error, message):
    """Asserts class and message of an error, and that no byte and no cell of the network has changed."""
    before, cells = snapshot(target), kinds(target)
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error and message in str(caught.value)
    assert (snapshot(target), kinds(target)) == (before, cells)


# What is quantized ----------------------------------------------------------------------------------------------


def test_all_linear_cells_but_the_head_adapted_or_not(mode):
    model, weights = plain(), {p.name: p.asnumpy().copy() for p in plain().get_parameters()}
    report = apply_lora(model, QLORA)
    found = kinds(model)
    assert found.pop("lm_head") == "Dense" and len(found) == 14
    assert {path for path, kind in found.items() if kind == "QLoRADense"} == set(report.replaced)
    assert {kind for path, kind in found.items() if path not in report.replaced} == {"NF4Dense"}
    for path, cell in model.cells_and_names():
        if isinstance(cell, (NF4Dense, QLoRADense)):
            np.testing.assert_array_equal(dequantize(nf4_array(cell)), dequantize(quantize(weights[f"{path}.weight"])))
    # In the same network in float, with these weights, the same comes out.
    twin = plain()
    for path, cell in twin.cells_and_names():
        if isinstance(cell, nn.Dense) and path != "lm_head":
            cell.weight.set_data(Tensor(dequantize(quantize(weights[f"{path}.weight"]))))
    np.testing.assert_allclose(model(x()).asnumpy(), twin(x()).asnumpy(), rtol=1e-4, atol=1e-4)


def test_quantize_base_and_apply_lora_after_it_are_the_same():
    model, config = plain(), LoraConfig(**FIELDS)
    paths = quantize_base(model)
    assert len(paths) == 14 and quantize_base(model) == ()
    apply_lora(model, config)
    other = plain()
    apply_lora(other, QLORA)
    assert kinds(model) == kinds(other)
    randomize(adapters(model).values())
    randomize(adapters(other).values())
    assert snapshot(model) == snapshot(other)


def test_all_linear_adapts_quantized_cells_too():
    model = plain()
    quantize_base(model)
    assert len(apply_lora(model, LoraConfig(lora_rank=2, target_modules="all-linear")).replaced) == 14


def test_float_and_quantized_adapted_cells_in_one_network(mode):
    model = network(
        LoraConfig(
            **{**FIELDS, "target_modules": ["wq", "w1", "lm_head"]}, quantize_base="nf4", quantize_exclude=["wq"]
        )
    )
    found = kinds(model)
    assert found["model.layers.0.attention.wq"] == found["lm_head"] == "LoRADense"
    assert found["model.layers.0.feed_forward.w1"] == "QLoRADense"
    model.set_train()
    step = nn.TrainOneStepCell(Mean(model), nn.SGD(model.trainable_params(), 1e-3))
    before = snapshot(model)
    losses = [float(step(x()).asnumpy()) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    changed = {name for name, content in snapshot(model).items() if content != before[name]}
    assert changed == set(adapters(model)) and len(changed) == 10


class Mean(nn.Cell):
    """The mean of what a network computes."""

    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, inputs):
        return self.model(inputs).mean()


def test_counts_are_of_weights_and_not_of_bytes():
    in_float = plain()
    apply_lora(in_float, LoraConfig(**FIELDS))
    freeze_base(in_float)
    assert trainable_summary(network()) == trainable_summary(in_float)
    assert apply_lora(plain(), QLORA) == apply_lora(plain(), LoraConfig(**FIELDS))


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"quantize_exclude": ["nothing"]}, TargetError, "quantize_exclude ['nothing'] matches no linear cell."),
        (
            {"quantize_exclude": ".*"},
            TargetError,
            "quantize_base finds no linear cell to quantize: output heads are left "
            "as they are, and quantize_exclude is '.*'.",
        ),
        (
            {"modules_to_save": ["wv"]},
            TargetError,
            "modules_to_save names model.layers.{0..1}.attention.wv.weight, which quantize_base would quantize",
        ),
        (
            {"lora_init": "loftq", "lora_rank": 7},
            ConfigError,
            "lora_init is 'loftq' and lora_rank 7, more than the smaller side of a weight [6, 6]",
        ),
        ({"target_modules": ["nothing"]}, TargetError, "target_modules ['nothing'] matches no linear cell"),
    ],
)
def test_what_cannot_be_quantized_changes_nothing(fields, error, message):
    model = plain()
    refused(lambda: apply_lora(model, LoraConfig(**{**FIELDS, **fields}, quantize_base="nf4")), model, error, message)


class Scaled(nn.Dense):
    """A linear cell with a forward of its own."""

    def construct(self, inputs):
        return 2 * super().construct(inputs)


def test_cells_that_cannot_be_quantized_are_listed():
    model = plain()
    model.model.layers[1].attention.wv = Scaled(6, 4)
    refused(
        lambda: quantize_base(model),
        model,
        UnsupportedCellError,
        "1 of the linear cells cannot be quantized; leave them out with quantize_exclude. "
        "model.layers.1.attention.wv: Scaled has a forward of its own",
    )
    assert len(quantize_base(model, "model.layers.1.attention.wv")) == 13
    model = plain()
    model.model.layers[1].feed_forward.w2.weight.set_data(Tensor(np.full((6, 9), np.inf, np.float32)))
    refused(
        lambda: quantize_base(model),
        model,
        QuantizationError,
        "The weights of model.layers.1.feed_forward.w2 hold NaN or infinity",
    )
    model = plain()
    apply_lora(model, LoraConfig(**FIELDS))
    refused(lambda: quantize_base(model), model, UnsupportedCellError, "adapters do not stack")


def test_what_cannot_be_adapted_is_found_before_anything_is_quantized():
    model = plain()
    model.model.layers[1].attention.wq = Scaled(6, 6)
    refused(
        lambda: apply_lora(model, LoraConfig(**FIELDS, quantize_base="nf4", quantize_exclude=["wq"])),
        model,
        UnsupportedCellError,
        "LoRA cannot be put on 1 of the selected cells. model.layers.1.attention.wq: Scaled",
    )


def test_what_is_quantized_does_not_train():
    model = network()
    with pytest.raises(TargetError, match="modules_to_save or freeze_exclude trains .*wv.weight, which is quantized"):
        freeze_base(model, LoraConfig(**FIELDS, freeze_exclude=["*wv.weight"]))
    model = plain()
    quantize_base(model)
    for fields, name in (({"use_dora": True}, "use_dora"), ({"lora_init": "olora"}, "lora_init olora")):
        refused(
            lambda fields=fields: apply_lora(model, LoraConfig(**FIELDS, **fields)),
            model,
            UnsupportedCellError,
            f"model.layers.0.attention.wq: The weight is quantized, which {name} does not take",
        )


# The configuration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"quantize_base": "nf5"}, "quantize_base is 'nf5', which is not known. Did you mean 'nf4'? Known: nf4."),
        ({"quantize_base": True}, "quantize_base is True, which is not known. Known: nf4."),
        ({"quantize_exclude": ["wq"]}, "quantize_exclude is ['wq'], and quantize_base is not set, so nothing is "),
        ({"quantize_base": "nf4", "quantize_exclude": []}, "quantize_exclude is []: it must be a list of names"),
        (
            {"quantize_base": "nf4", "use_dora": True},
            "quantize_base is 'nf4' and use_dora True, which needs the base's weights in float.",
        ),
        (
            {"quantize_base": "nf4", "lora_init": "pissa"},
            "quantize_base is 'nf4' and lora_init 'pissa', which needs the "
            "base's weights in float. Leave one of them out; a start that suits a quantized base is lora_init: loftq.",
        ),
        (
            {"lora_init": "loftq"},
            "lora_init is 'loftq', which makes up for what quantizing the base loses, and the base is "
            "not quantized. Set quantize_base: nf4, or use 'pissa'.",
        ),
    ],
)
def test_configurations_that_are_refused(fields, message):
    for make in (
        lambda: LoraConfig(**fields),
        lambda: LoraConfig.from_pet_config({"pet_type": "lora", "target_modules": "all-linear", **fields}),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert str(caught.value).startswith(message)


# Saved and loaded -----------------------------------------------------------------------------------------------


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


def test_between_the_quantized_and_the_float_base_it_is_said_that_nothing_was_compared(tmp_path, recwarn, caplog):
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
            f"{tmp_path / name} was trained on a base in {words}: of the two, paths and shapes alone were compared."
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
    with pytest.raises(RuntimeError):  # and never into a network that is not quantized
        ms.load_param_into_net(in_float, ms.load_checkpoint(str(tmp_path / "all.ckpt")))


# Merging --------------------------------------------------------------------------------------------------------


def test_merging_in_place_is_refused_with_what_it_would_cost():
    model = network()
    model.set_train(False)
    with pytest.raises(MergeError) as caught:
        merge_lora(model)
    assert "have to be quantized again: that would err by" in str(caught.value)
    cells = [cell for _, cell in lora_cells(model)]
    change = [1.5 * as_array(b) @ as_array(a) for a, b in (cell.lora_parameters() for cell in cells)]
    merged = [(dequantize(nf4_array(cell)) + delta).astype(np.float32) for cell, delta in zip(cells, change)]
    error = np.concatenate([(dequantize(quantize(array)) - array).ravel() for array in merged])
    change = np.concatenate([delta.ravel() for delta in change])
    numbers = [f"{np.sqrt(np.mean(np.square(array))):.2g}" for array in (error, change)]
    assert f"err by {numbers[0]} " in str(caught.value) and f"by {numbers[1]}." in str(caught.value)


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
    refused(lambda: merge_and_unload(model), model, MergeError, "holds NaN or infinity, so that nothing was merged")
    assert not any(hasattr(cell._adopted[0].emptied_cell, "weight") for _, cell in lora_cells(model))


# LoftQ ----------------------------------------------------------------------------------------------------------

LOFTQ = LoraConfig(**{**FIELDS, "rank_pattern": {"w1": 3}}, quantize_base="nf4", lora_init="loftq")


def test_loftq_comes_nearer_to_the_base_in_float():
    model, weights = plain(), {p.name: p.asnumpy().copy() for p in plain().get_parameters()}
    apply_lora(model, LOFTQ)
    for path, cell in lora_cells(model):
        weight, (a, b) = weights[f"{path}.weight"], cell.lora_parameters()
        residual = weight - dequantize(quantize(weight))
        np.testing.assert_array_equal(cell.weight.asnumpy(), quantize(weight).codes)
        # One turn: the adapter is what quantizing lost, at its rank.
        u, s, vt = np.linalg.svd(residual, full_matrices=False)
        rank = cell.lora_rank
        assert rank == (3 if path.endswith("w1") else 2)
        np.testing.assert_allclose(
            cell.scale * as_array(b) @ as_array(a), (u[:, :rank] * s[:rank]) @ vt[:rank], atol=1e-5
        )


@pytest.mark.parametrize("name, turns", [("loftq_iter_1", 1), ("loftq_iter_4", 4)])
def test_turns_of_loftq(name, turns):
    model, weights = plain(), {p.name: p.asnumpy().copy() for p in plain().get_parameters()}
    apply_lora(model, LoraConfig(**FIELDS, quantize_base="nf4", lora_init=name))
    for path, cell in lora_cells(model):
        array, a, b = loftq(weights[f"{path}.weight"], 2, quantize, dequantize, turns, 1.5)
        np.testing.assert_array_equal(cell.weight.asnumpy(), array.codes)
        for parameter, expected in zip(cell.lora_parameters(), (a, b)):
            np.testing.assert_array_equal(as_array(parameter), expected)
    assert base_fingerprint(model)["quantization"] == "loftq"


def test_an_adapter_from_loftq_fits_its_own_base_alone(tmp_path):
    source = plain()
    apply_lora(source, LOFTQ)
    save_lora(source, str(tmp_path / "adapter"))
    again = plain()
    apply_lora(again, LOFTQ)
    randomize(adapters(again).values(), 9)
    load_lora(again, str(tmp_path / "adapter"), on_base_mismatch="error")
    assert snapshot(again) == snapshot(source)
    with pytest.raises(BaseMismatchError, match="other values"):
        load_lora(plain(), str(tmp_path / "adapter"), on_base_mismatch="error")


def test_loftq_needs_the_weights_in_float():
    from mindspore.nn.utils import no_init_parameters

    with no_init_parameters():
        model = TinyModel()
    with pytest.raises(LoraError, match="lora_init 'loftq' is made from the base's weights in float, which have no"):
        apply_lora(model, LOFTQ)
    assert not any(isinstance(cell, NF4Dense) for _, cell in model.cells_and_names())
    for name in ("loftq", "loftq_iter_4"):  # what pet_config with adapter_path puts on the network
        assert dataclasses.replace(LOFTQ, lora_init=name).as_saved() == dataclasses.replace(LOFTQ, lora_init=None)
