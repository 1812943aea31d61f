"""A quantized network: what quantize_base and apply_lora quantize, and what they refuse."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, quantize_base, trainable_summary
from mindlora.core.errors import ConfigError, QuantizationError, TargetError, UnsupportedCellError
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.network.quantized.nf4 import NF4Dense, QLoRADense, nf4_array
from tests.conftest import in_mode
from tests.support.networks import adapters, randomize, snapshot
from tests.support.quantized_networks import FIELDS, QLORA, kinds, network, plain, x
from tests.support.refusals import part, refused_unchanged


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
    # The same network in float, with the dequantized weights, gives the same output.
    twin = plain()
    for path, cell in twin.cells_and_names():
        if isinstance(cell, nn.Dense) and path != "lm_head":
            cell.weight.set_data(Tensor(dequantize(quantize(weights[f"{path}.weight"]))))
    found = model(x()).asnumpy()
    with in_mode(ms.PYNATIVE_MODE):
        np.testing.assert_allclose(found, twin(x()).asnumpy(), rtol=1e-4, atol=1e-4)


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
            "quantize_base finds no linear cell to quantize: output heads are never "
            "quantized, and quantize_exclude is '.*'.",
        ),
        (
            {"modules_to_save": ["wv"]},
            TargetError,
            "modules_to_save names model.layers.{0..1}.attention.wv.weight, which quantize_base would quantize",
        ),
        (
            {"lora_init": "loftq", "lora_rank": 7},
            ConfigError,
            "lora_init is 'loftq' and lora_rank is 7, more than the smaller side of a weight [6, 6]",
        ),
        ({"target_modules": ["nothing"]}, TargetError, "target_modules ['nothing'] matches no linear cell"),
    ],
)
def test_what_cannot_be_quantized_changes_nothing(fields, error, message):
    model = plain()
    refused_unchanged(
        model, error, part(message), lambda: apply_lora(model, LoraConfig(**{**FIELDS, **fields}, quantize_base="nf4"))
    )


class Scaled(nn.Dense):
    """A linear cell with a forward of its own."""

    def construct(self, inputs):
        return 2 * super().construct(inputs)


def test_cells_that_cannot_be_quantized_are_listed():
    model = plain()
    model.model.layers[1].attention.wv = Scaled(6, 4)
    refused_unchanged(
        model,
        UnsupportedCellError,
        part(
            "1 of the linear cells cannot be quantized; leave them out with quantize_exclude. "
            "model.layers.1.attention.wv: Scaled has a forward of its own"
        ),
        lambda: quantize_base(model),
    )
    assert len(quantize_base(model, "model.layers.1.attention.wv")) == 13
    model = plain()
    model.model.layers[1].feed_forward.w2.weight.set_data(Tensor(np.full((6, 9), np.inf, np.float32)))
    refused_unchanged(
        model,
        QuantizationError,
        part("The weights of model.layers.1.feed_forward.w2 hold NaN or infinity"),
        lambda: quantize_base(model),
    )
    model = plain()
    apply_lora(model, LoraConfig(**FIELDS))
    refused_unchanged(model, UnsupportedCellError, part("adapters do not stack"), lambda: quantize_base(model))


def test_what_cannot_be_adapted_is_found_before_anything_is_quantized():
    model = plain()
    model.model.layers[1].attention.wq = Scaled(6, 6)
    refused_unchanged(
        model,
        UnsupportedCellError,
        part("LoRA cannot be put on 1 of the selected cells. model.layers.1.attention.wq: Scaled"),
        lambda: apply_lora(model, LoraConfig(**FIELDS, quantize_base="nf4", quantize_exclude=["wq"])),
    )


def test_what_is_quantized_does_not_train():
    model = network()
    with pytest.raises(TargetError, match="modules_to_save or freeze_exclude trains .*wv.weight, which is quantized"):
        freeze_base(model, LoraConfig(**FIELDS, freeze_exclude=["*wv.weight"]))
    model = plain()
    quantize_base(model)
    for init in ("pissa", "olora"):
        refused_unchanged(
            model,
            UnsupportedCellError,
            part(f"model.layers.{{0..1}}.feed_forward.w1: lora_init {init!r} is not supported on quantized weights"),
            lambda init=init: apply_lora(model, LoraConfig(**FIELDS, lora_init=init)),
        )
