"""Routed experts in apply_lora, freeze_base, save_lora, load_lora and the merges."""

import json

import numpy as np
import pytest
from mindspore import nn
from safetensors.numpy import load_file, save_file

from mindlora import (
    LoraConfig,
    apply_lora,
    freeze_base,
    load_lora,
    merge_and_unload,
    merge_lora,
    save_lora,
    trainable_summary,
    unmerge_lora,
)
from mindlora.core.errors import (
    ConfigError,
    MissingTensorsError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
    TargetError,
    UnexpectedTensorsError,
)
from mindlora.files.adapters import expert_pairs
from mindlora.files.adapters import files as adapter_files
from mindlora.network.tree import lora_cells
from tests.support.mcore_networks import in_training
from tests.support.moe_networks import EXPERTS, HIDDEN, INNER, changed_weight, experts_alone
from tests.support.networks import adapters, as_array, randomize, snapshot

RANK, ALPHA = 2, 3
HOLDER = "decoder.layers.0.mlp.experts"


@pytest.fixture(scope="module", autouse=True)
def on_a_cpu(mindformers):
    with in_training():
        yield


class WithHead(nn.Cell):
    """Experts, and a linear cell after them."""

    def __init__(self):
        super().__init__()
        self.decoder, self.proj = experts_alone().decoder, nn.Dense(HIDDEN, 4)


def adapted(seed=0, **keys):
    """Returns a network whose experts have adapters of random A and B."""
    network = experts_alone()
    config = {"target_parameters": ["mlp.experts"], "lora_rank": RANK, "lora_alpha": ALPHA, **keys}
    apply_lora(network, LoraConfig(**config))
    freeze_base(network)
    randomize(network.trainable_params(), seed)
    return network


# Selection ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, selected",
    [
        ({"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}, "12"),
        ({"target_parameters": ["mlp.experts"]}, "12"),
        ({"target_parameters": ["down_proj"]}, "2"),
        ({"target_parameters": ["experts.weight1"]}, "1"),
        ({"target_parameters": ["mlp.experts"], "exclude_modules": ["weight2", "wq"]}, "1"),
        ({"target_parameters": ["mlp.experts"], "exclude_modules": ".*weight1"}, "2"),
        ({"target_parameters": ["mlp.experts"], "layers_to_transform": 0}, "12"),
        ({"target_modules": ["mlp.experts"]}, "12"),
        ({"target_modules": r".*mlp\.experts\.gate_up_proj"}, "1"),
        ({"target_modules": ["weight2", "proj"]}, "2p"),
        ({"target_modules": ["proj"], "target_parameters": ["gate_up_proj"]}, "1p"),
        ({"target_modules": "all-linear"}, "p"),
        ({"target_modules": "all-linear", "target_parameters": ["experts"]}, "12p"),
    ],
    ids=str,
)
def test_names_select_weights(fields, selected):
    paths = {"1": f"{HOLDER}.weight1", "2": f"{HOLDER}.weight2", "p": "proj"}
    network = WithHead()
    assert apply_lora(network, LoraConfig(**fields)).replaced == tuple(paths[name] for name in selected)
    assert {path for path, _ in lora_cells(network)} == {paths[name] for name in selected}


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"target_parameters": ["mlp.gate"]}, TargetError, "'mlp.gate', which matches no stacked weight of experts"),
        ({"target_parameters": ["experts", "proj"]}, TargetError, "'proj', which matches no stacked weight"),
        (
            {"target_parameters": ["experts"], "exclude_modules": ["experts"]},
            TargetError,
            "excludes all that target_par",
        ),
        ({"target_parameters": ["experts"], "layers_to_transform": 3}, TargetError, "layers_to_transform names 3"),
        ({"target_parameters": "experts"}, ConfigError, "target_parameters is 'experts'"),
    ],
    ids=str,
)
def test_names_that_select_nothing_are_refused(fields, error, message):
    network = WithHead()
    before = snapshot(network)
    with pytest.raises(error) as found:
        apply_lora(network, LoraConfig(**fields))
    assert message in str(found.value) and snapshot(network) == before and not dict(lora_cells(network))


def test_pet_config_may_name_parameters_alone():
    node = {"pet_type": "lora", "target_parameters": ("experts.down_proj",), "lora_rank": 4}
    assert LoraConfig.from_pet_config(node).target_parameters == ["experts.down_proj"]


def test_only_a_and_b_train_and_the_base_keeps_its_names():
    base = set(snapshot(experts_alone()))
    network = adapted()
    names = {f"{HOLDER}.{leaf}.mindpet_delta_lora_{half}" for leaf in ("weight1", "weight2") for half in "ab"}
    assert {p.name for p in network.trainable_params()} == names and set(snapshot(network)) == base | names
    text = trainable_summary(network)
    assert f"{HIDDEN} x {2 * INNER}" in text and f"{EXPERTS * RANK * (HIDDEN + 2 * INNER):,}" in text


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form, name", [("peft", "adapter"), ("ckpt", "a.ckpt"), ("mindformers", "a.safetensors")])
@pytest.mark.parametrize("has_lora", [True, False], ids=["into an adapter", "into the base"])
def test_an_adapter_comes_back_bit_for_bit(tmp_path, form, name, has_lora):
    network, path = adapted(), str(tmp_path / name)
    save_lora(network, path, form)
    other = adapted(seed=1) if has_lora else experts_alone()
    load_lora(other, path, on_base_mismatch="error")
    assert {name: as_array(p).tolist() for name, p in adapters(other).items()} == {
        name: as_array(p).tolist() for name, p in adapters(network).items()
    }


def test_the_folder_says_what_peft_needs(tmp_path):
    network = WithHead()
    apply_lora(network, LoraConfig(target_modules=["proj"], target_parameters=["experts"], lora_rank=RANK))
    save_lora(network, str(tmp_path / "adapter"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["target_modules"] == ["proj"] and config["r"] == RANK


def test_pairs_of_single_experts_are_loaded_into_the_stacked_weights(tmp_path):
    network = adapted()
    save_lora(network, str(tmp_path / "stacked"))
    adapter = adapter_files.read(str(tmp_path / "stacked"))
    expert_pairs.unstack_pairs(adapter)
    # PEFT's older adapters may have one; it matters for training alone.
    adapter.selection, adapter.dropout = {}, 0.1
    adapter_files.write(adapter, str(tmp_path / "single"))
    assert len(load_file(tmp_path / "single" / "adapter_model.safetensors")) == 6 * EXPERTS
    for other in (adapted(seed=1), experts_alone()):
        load_lora(other, str(tmp_path / "single"))
        for name, parameter in adapters(network).items():
            np.testing.assert_array_equal(as_array(adapters(other)[name]), as_array(parameter))


def test_mindformers_2s_own_form_is_loaded(tmp_path):
    network, tensors = adapted(), {}
    for name, parameter in adapters(network).items():
        leaf, half = name.split(".")[5], name[-1]
        # MindFormers 2 multiplies x A B.
        tensors[f"{HOLDER}.{leaf}_lora_{half}"] = np.ascontiguousarray(parameter.asnumpy().swapaxes(1, 2))
    save_file(tensors, tmp_path / "adapter.safetensors")
    (tmp_path / "mindformers_adapter_config.json").write_text(json.dumps({"lora_config": {"lora_alpha": ALPHA}}))
    other = experts_alone()
    load_lora(other, str(tmp_path))
    for name, parameter in adapters(network).items():
        np.testing.assert_array_equal(as_array(adapters(other)[name]), as_array(parameter))


def test_what_does_not_belong_is_refused(tmp_path):
    save_lora(adapted(), str(tmp_path / "both"))
    save_lora(adapted(target_parameters=["down_proj"]), str(tmp_path / "one"))
    cases = [
        (adapted(lora_rank=3), "both", RankMismatchError, "has rank 2, but the network was built with lora_rank 3"),
        (adapted(lora_alpha=5), "both", ScaleMismatchError, "lora_alpha 3, but the network was built with 5"),
        (adapted(target_parameters=["down_proj"]), "both", UnexpectedTensorsError, "holds 2 LoRA tensors that"),
        (adapted(), "one", MissingTensorsError, "lacks 2 LoRA tensors of the network"),
        (experts_alone(moe_ffn_hidden_size=INNER + 1), "both", ShapeMismatchError, "the network's is [4, 14, 2]"),
    ]
    for network, name, error, message in cases:
        before = snapshot(network)
        with pytest.raises(error) as found:
            load_lora(network, str(tmp_path / name))
        assert message in str(found.value) and snapshot(network) == before


def test_a_lost_pair_is_noticed_where_the_configuration_names_it(tmp_path):
    save_lora(adapted(target_parameters=["down_proj"]), str(tmp_path / "adapter"))
    adapter = adapter_files.read(str(tmp_path / "adapter"))
    adapter.selection["target_parameters"] = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    adapter_files.write(adapter, str(tmp_path / "lost.ckpt"), "ckpt")
    with pytest.raises(MissingTensorsError, match=r"lacks 2 LoRA tensors of the network: .*weight1"):
        load_lora(experts_alone(), str(tmp_path / "lost.ckpt"))


# Merging --------------------------------------------------------------------------------------------------------------


def test_merging_folds_each_experts_product_into_its_rows_and_unmerging_takes_it_out():
    network = adapted()
    network.set_train(False)
    before, arrays = snapshot(network), {p.name: as_array(p) for p in network.get_parameters()}
    report = merge_lora(network)
    assert report.merged == (f"{HOLDER}.weight1", f"{HOLDER}.weight2")
    found = {p.name: as_array(p) for p in network.get_parameters()}
    for path in report.merged:
        a, b = (arrays[f"{path}.mindpet_delta_lora_{half}"] for half in "ab")
        expected = changed_weight(arrays[path], a, b, ALPHA / RANK).reshape(arrays[path].shape)
        np.testing.assert_allclose(found[path], expected, rtol=1e-6, atol=1e-6)
        assert not found[f"{path}.mindpet_delta_lora_b"].any()
    unmerge_lora(network)
    assert snapshot(network) == before


def test_merge_and_unload_puts_mindformers_cell_back():
    plain, network = experts_alone(), adapted()
    experts = type(plain.decoder.layers[0].mlp.experts)
    network.set_train(False)
    merge_and_unload(network)
    assert type(network.decoder.layers[0].mlp.experts) is experts and not dict(lora_cells(network))
    assert snapshot(network).keys() == snapshot(plain).keys()
    assert all(after != snapshot(plain)[name] for name, after in snapshot(network).items())
