"""modules_to_save of mcore models: what trains of a router, and parameters that no legacy model has come back."""

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.core.errors import TargetError
from mindlora.files.adapters import files
from mindlora.files.base.merge import merge_checkpoint
from mindlora.network.tree import saved_module_parameters
from tests.support.mcore_networks import arrays, tiny_qwen3
from tests.support.moe_networks import tiny_moe

ROUTER, BIAS = "decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.router.expert_bias"
NORM = "decoder.layers.0.self_attention.q_layernorm.weight"
CASES = [
    ("deepseek_v3", "router", {ROUTER: "mlp.gate.weight", BIAS: "mlp.gate.e_score_correction_bias"}),
    ("qwen3_moe", "mlp.gate", {ROUTER: "mlp.gate.weight"}),
    ("qwen3_moe", "q_norm", {NORM: "self_attn.q_norm.weight"}),
]


@pytest.mark.parametrize("model, module, saved", CASES, ids=[f"{model} {module}" for model, module, _ in CASES])
def test_a_module_of_an_mcore_model_is_saved_and_comes_back_everywhere(model, module, saved, mindformers, tmp_path):
    network = tiny_moe(model)
    config = LoraConfig(target_modules=["linear_proj"], lora_rank=2, lora_alpha=4, modules_to_save=[module])
    report = apply_lora(network, config)
    freeze_base(network)
    # The bias balances experts without a gradient; what a router counts (expert_load, fi_accu) is of the step alone.
    trained = {p.name for p in network.trainable_params() if "lora" not in p.name}
    assert trained == set(saved) - {BIAS}
    assert report.trainable == sum(p.size for p in network.trainable_params())
    base = {name: array for name, array in arrays(network).items() if "lora" not in name}
    set_values(
        network, values := {name: np.sin(np.arange(base[name].size)).reshape(base[name].shape) for name in saved}
    )
    assert {p.name for p in saved_module_parameters(network)} == set(saved)
    save_lora(network, tmp_path / "adapter")
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(found) == 2 + len(saved)
    check({name: found[f"base_model.model.model.layers.0.{ending}"] for name, ending in saved.items()}, values)
    files.write(files.read(str(tmp_path / "adapter")), str(tmp_path / "own.safetensors"), "mindformers")
    other = tiny_moe(model)
    for adapter in ("adapter", "own.safetensors"):
        load_lora(other, tmp_path / adapter)
        check(arrays(other), values)
        set_values(other, {name: np.zeros_like(array) for name, array in values.items()})
    save_file(base, str(tmp_path / "base.safetensors"))
    merge_checkpoint(*(str(tmp_path / name) for name in ("base.safetensors", "adapter", "merged.safetensors")))
    check(load_file(tmp_path / "merged.safetensors"), values)


@pytest.mark.parametrize("module", ["linear_qkv", "linear_fc1"])
def test_a_joined_cell_is_refused_before_it_trains_as_no_file_has_a_name_for_it(module, mindformers):
    config = LoraConfig(target_modules=["linear_proj"], lora_rank=2, lora_alpha=4, modules_to_save=[module])
    with pytest.raises(TargetError, match=rf"decoder\.layers\.0\.\w+\.{module} joins weights that an adapter's file"):
        apply_lora(tiny_qwen3(), config)


def set_values(network, values):
    parameters = network.parameters_dict()
    for name, array in values.items():
        parameters[name].set_data(ms.Tensor(array.astype(np.float32)))


def check(found, values):
    for name, array in values.items():
        np.testing.assert_array_equal(found[name], array.astype(np.float32))
