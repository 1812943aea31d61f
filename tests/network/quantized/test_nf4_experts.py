"""Routed experts in 4 bits: outputs, gradients, files and merges are those of the dequantized experts in float."""

import contextlib

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import (
    LoraConfig,
    apply_lora,
    freeze_base,
    load_lora,
    merge_and_unload,
    merge_lora,
    quantize_base,
    quantize_checkpoint,
    save_lora,
    trainable_summary,
)
from mindlora.core.errors import MergeError, TargetError, UnsupportedCellError
from mindlora.core.formats.safetensors_file import TensorFile, write_arrays
from mindlora.core.numerics.nf4 import TENSOR_NAMES, dequantize, quantize, tensor_name
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight
from mindlora.network.quantized.nf4 import NF4ExpertWeight, QLoRAExpertWeight, nf4_array, parameter_count
from tests.support import moe_networks
from tests.support.mcore_networks import in_training
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.moe_cells import WeightedOutput
from tests.support.moe_networks import HIDDEN, changed_weight, routed
from tests.support.networks import adapters, as_array, assert_close, normal, randomize, snapshot

# Blocks of W2 [4 * 70, 8] are not full, and W1 [4 * 8, 140] has three of them in a row.
WIDE = {"moe_ffn_hidden_size": 70}
PATH = "decoder.layers.0.mlp.experts"
EXPERT_LORA = {"target_parameters": ["mlp.experts"], "lora_rank": 2, "lora_alpha": 3}
QLORA = LoraConfig(**EXPERT_LORA, quantize_base="nf4")


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu(mindformers):
    with in_training():
        yield


def experts_of(network):
    return network.decoder.layers[0].mlp.experts


def in_float(config=None):
    """Returns a network whose stacked weights are the dequantized ones, with adapters of the same values."""
    network = moe_networks.experts_alone(**WIDE)
    for parameter in network.get_parameters():
        if parameter.name.endswith(("weight1", "weight2")):
            parameter.set_data(Tensor(dequantize(quantize(parameter.asnumpy()))))
    if config is not None:
        apply_lora(network, config)
        randomize(adapters(network).values())
    return network


def quantized(config=QLORA):
    network = moe_networks.experts_alone(**WIDE)
    apply_lora(network, config)
    randomize(adapters(network).values())
    return network


def test_the_parameters_are_what_quantize_makes_of_the_whole_matrix_and_what_a_quantized_base_holds(tmp_path):
    network = moe_networks.experts_alone(**WIDE)
    weights = {p.name: p.asnumpy().copy() for p in network.get_parameters() if "weight" in p.name}
    count, base, output = parameter_count(network), str(tmp_path / "base.safetensors"), str(tmp_path / "q.safetensors")
    write_arrays(base, {**weights, "decoder.final_layernorm.weight": np.ones(HIDDEN, np.float32)})
    quantize_checkpoint(base, output)
    assert quantize_base(network) == (f"{PATH}.weight1", f"{PATH}.weight2") == tuple(weights)
    found = {p.name: p for p in network.get_parameters() if "weight" in p.name}
    expected = {
        tensor_name(name, field): getattr(quantize(array), field)
        for name, array in weights.items()
        for field in TENSOR_NAMES
    }
    assert set(found) == set(expected)
    with TensorFile(output) as file:
        assert set(file.tensors) == {*expected, "decoder.final_layernorm.weight"}
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name].asnumpy(), array, strict=True)
            np.testing.assert_array_equal(file.read(name), array, strict=True)
    assert not any(p.requires_grad for p in found.values())
    assert parameter_count(network) == count
    assert quantize_base(network) == ()


def test_output_and_gradients_are_those_of_dequantized_experts(graph_mode):
    (x, probs, chosen), weights = routed(), normal(1, 5, HIDDEN, seed=4)
    results = []
    for network, its_mode in (
        (quantized(), contextlib.nullcontext),
        (in_float(LoraConfig(**EXPERT_LORA)), mcore_in_pynative),
    ):
        freeze_base(network)
        parameters = network.trainable_params()
        assert len(parameters) == 4
        with its_mode():
            loss, gradients = ms.value_and_grad(WeightedOutput(network), None, parameters)(
                *map(Tensor, (x, probs, chosen, weights))
            )
        results.append((loss, dict(zip((p.name for p in parameters), gradients))))
    (loss, found), (expected_loss, expected) = results
    assert_close(loss, as_array(expected_loss))
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert as_array(gradient).any()
        assert_close(found[name], as_array(gradient))


def test_without_an_adapter_and_with_one_weight_in_float(graph_mode):
    inputs = tuple(map(Tensor, routed()))
    network = moe_networks.experts_alone(**WIDE)
    weight2 = dequantize(quantize(experts_of(network).weight2.asnumpy()))
    assert quantize_base(network, ["mlp.experts.down_proj"]) == (f"{PATH}.weight1",)
    kinds = [type(cell) for cell in experts_of(network).cells()][:2]
    assert kinds[0] is NF4ExpertWeight and kinds[1] is ExpertWeight
    # An adapter on the one that stayed in float.
    apply_lora(network, LoraConfig(target_parameters=["experts.weight2"], lora_rank=2))
    assert type(experts_of(network).weight2) is LoRAExpertWeight
    experts_of(network).weight2.weight.set_data(Tensor(weight2))
    with mcore_in_pynative():
        expected = as_array(in_float()(*inputs))
    assert_close(network(*inputs), expected)


def test_quantize_exclude_keeps_them_in_float():
    network = moe_networks.experts_alone(**WIDE)
    config = LoraConfig(**EXPERT_LORA, quantize_base="nf4", quantize_exclude=["experts.weight2"])
    apply_lora(network, config)
    assert type(experts_of(network).weight1) is QLoRAExpertWeight
    assert type(experts_of(network).weight2) is LoRAExpertWeight
    with pytest.raises(TargetError, match="quantize_base finds no linear cell to quantize"):
        quantize_base(moe_networks.experts_alone(**WIDE), ["mlp.experts.weight1", "mlp.experts.weight2"])


def test_loftq_is_refused_before_anything_changes():
    network = moe_networks.experts_alone(**WIDE)
    before = snapshot(network)
    with pytest.raises(UnsupportedCellError, match="lora_init 'loftq' is not supported on stacked experts"):
        apply_lora(network, LoraConfig(**EXPERT_LORA, quantize_base="nf4", lora_init="loftq"))
    assert snapshot(network) == before


def test_the_adapter_is_saved_and_loaded_onto_4_bits_and_onto_float(tmp_path):
    network, folder = quantized(), str(tmp_path / "adapter")
    save_lora(network, folder)
    assert "weight1" in trainable_summary(network)
    in_4_bits, in_float = (moe_networks.experts_alone(**WIDE) for _ in range(2))
    quantize_base(in_4_bits)
    for other in (in_4_bits, in_float):
        load_lora(other, folder)
        values = {name: as_array(p) for name, p in adapters(other).items()}
        for name, parameter in adapters(network).items():
            np.testing.assert_array_equal(values[name], as_array(parameter))


def test_merging_into_4_bits_is_refused_and_merge_and_unload_gives_float_back():
    network = quantized()
    network.set_train(True)
    with pytest.raises(MergeError, match="is in training mode"):
        merge_and_unload(network)
    # The float copies that it had made are gone again.
    assert not any(hasattr(experts_of(network).weight1._adopted[0].holder, leaf) for leaf in ("weight1", "weight2"))
    network.set_train(False)
    values = {
        leaf: changed_weight(dequantize(nf4_array(cell)), *map(as_array, cell.lora_parameters()), cell.scale)
        for leaf, cell in experts_of(network).name_cells().items()
        if leaf.startswith("weight")
    }
    with pytest.raises(MergeError, match="are quantized, and merged ones"):
        merge_lora(network)
    merge_and_unload(network)
    experts = experts_of(network)
    assert type(experts).__name__ == "CpuFFNGroupedGEMM"
    for leaf, value in values.items():
        assert getattr(experts, leaf).name == f"{PATH}.{leaf}"
        assert_close(getattr(experts, leaf), value.reshape(-1, value.shape[2]))


def test_a_merge_beside_4_bits_leaves_these_as_they_are():
    network = quantized(LoraConfig(**{**EXPERT_LORA, "target_parameters": ["experts.weight2"]}, quantize_base="nf4"))
    codes = nf4_array(experts_of(network).weight1).codes
    network.set_train(False)
    merge_and_unload(network)
    assert type(experts_of(network).weight2) is ExpertWeight
    np.testing.assert_array_equal(nf4_array(experts_of(network).weight1).codes, codes)
