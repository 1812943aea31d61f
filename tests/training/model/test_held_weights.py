"""A base that stays in 16 bits while it trains on a CPU: the losses are those of the same weights in float32."""

import contextlib
import functools
import json

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.common import dtype as mstype
from safetensors.numpy import load_file

from mindlora import LoraConfig
from mindlora.core.errors import ConfigError
from mindlora.network.cells.cell import LoRACell
from mindlora.network.tree import lora_cells
from mindlora.ops.frozen_linear import FrozenExperts
from mindlora.training.preference.reference import reference_network
from mindlora.training.several.stack import stack_adapters
from tests.support import tiny_runs
from tests.support.mcore_networks import (
    Loss,
    for_a_cpu,
    in_training,
    tiny_deepseek_v3,
    tiny_qwen3,
    tiny_qwen3_moe,
    tokens,
    train,
    with_adapters,
)
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.what_runs import shows

PET = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["linear_qkv", "linear_fc2"], "seed": 3}


@pytest.fixture(autouse=True)
def graph_of_training(mindformers):
    ms.set_context(mode=ms.GRAPH_MODE)
    with in_training():
        yield


def floats(network):
    """The parameters in float; MindFormers 1.8 keeps the state of a dropout as whole numbers."""
    return [parameter for parameter in network.get_parameters() if "Float" in str(parameter.dtype)]


def rounded(network):
    """Rounds a network's parameters to bfloat16, in the dtypes that they have; returns the network."""
    for parameter in floats(network):
        parameter.set_data(parameter.astype(mstype.bfloat16).astype(parameter.dtype))
    return network


def qwen3_losses(held, **keys):
    """The losses of a tiny Qwen3 whose weights are numbers of bfloat16 and which holds them so, or in float32."""
    network = rounded(tiny_qwen3(params_dtype=held, **keys))
    assert {str(each.dtype) for each in floats(network)} == {"BFloat16" if held == "bfloat16" else "Float32"}
    # DoRA reads the whole weights too.
    adapted = with_adapters(network, **PET, use_dora=True)
    # As the train step does once more.
    for_a_cpu(adapted)
    bases = [cell.base for _, cell in lora_cells(adapted)]
    bases += [cell.held for _, cell in adapted.cells_and_names() if hasattr(cell, "held")]
    assert [base.holds for base in bases] == ([True] * 5 if held == "bfloat16" else [False] * 2)
    with contextlib.nullcontext() if held == "bfloat16" else mcore_in_pynative():
        losses = train(adapted, 8)
    assert all(parameter.dtype == mstype.float32 for parameter in adapted.trainable_params())
    return losses


@shows("lora", "qwen3")
def test_a_qwen3_in_bfloat16_learns_what_it_does_in_float32():
    # A tied output layer reads the table of the embedding, by rows and as a weight.
    expected = qwen3_losses("float32", tie_word_embeddings=True)
    found = qwen3_losses("bfloat16", tie_word_embeddings=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert found[-1] < found[0] - 0.3


def llama_run(folder, name, mode=0, **model):
    """The metrics of a run of mindlora-run on a tiny Llama, its log, and the adapter that it saves."""
    data, held_out = folder / "data.mindrecord", folder / "held_out.mindrecord"
    if not data.exists():
        tiny_runs.write_data(data, 32)
        tiny_runs.write_data(held_out, 4, seed=1)
    callbacks = [
        {"type": "HeldOutLoss", "dataset_dir": str(held_out), "every_steps": 4, "batch_size": 4},
        {"type": "LoraCheckpoint", "save_steps": 4},
    ]
    config = tiny_runs.tiny_config(data, 1, callbacks)
    config["context"]["mode"] = mode
    pet = config["model"]["model_config"]["pet_config"]
    pet.update(model.pop("pet", {}))
    config["model"]["model_config"].update(model)
    # In a loop of the graph, MindSpore would copy the weights that it keeps for the backward, and cannot in bfloat16.
    config["runner_config"]["gradient_accumulation_steps"] = 2
    result = tiny_runs.launch(config, folder / name)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    adapter = load_file(folder / name / "lora_checkpoint" / "step_4" / "adapter_model.safetensors")
    return records, result.stdout + result.stderr, adapter


@shows("lora", "llama")
@shows("held_out", "llama")
def test_a_llama_in_bfloat16_trains_is_evaluated_and_saves_its_adapter_in_float32(tmp_path):
    held = {"param_init_type": "bfloat16", "pet": {"product_dtype": "bfloat16"}}
    records, log, adapter = llama_run(tmp_path, "held", **held)
    expected, _, expected_adapter = llama_run(tmp_path, "float32", mode=1)
    for key in ("loss", "held_out_loss"):
        found, wanted = ([record[key] for record in each if key in record] for each in (records, expected))
        assert len(found) == (4 if key == "loss" else 1)
        np.testing.assert_allclose(found, wanted, rtol=5e-3, err_msg=key)
    assert "The base stays in bfloat16" in log and "products in bfloat16" in log and "tokens at a time" in log
    assert adapter.keys() == expected_adapter.keys()
    assert {tensor.dtype for tensor in adapter.values()} == {np.dtype(np.float32)}


EXPERTS = ["mlp.experts.down_proj"]
# What trains beside or on a base in 16 bits: the model, and keys of pet_config.
FEATURES = {
    "dora-and-saved-modules": (
        tiny_qwen3,
        {
            "use_dora": True,
            "target_modules": ["linear_qkv", "linear_fc2", "output_layer"],
            "modules_to_save": ["norm", "embed_tokens"],
        },
    ),
    "miss": (tiny_qwen3, {"use_miss": True, "lora_alpha": 4}),
    "vera": (tiny_qwen3, {"use_vera": True, "lora_alpha": 4, "target_modules": ["linear_proj", "linear_fc2"]}),
    "adalora": (tiny_qwen3, {"use_adalora": True, "init_r": 4, "target_r": 2}),
    # The experts' first weight has no adapter, and the router trains.
    "experts-and-embedding": (
        tiny_qwen3_moe,
        {
            "target_modules": ["linear_qkv", "word_embeddings"],
            "target_parameters": EXPERTS,
            "neftune_alpha": 5.0,
            "freeze_exclude": ["*router.weight"],
        },
    ),
    "deepseek": (tiny_deepseek_v3, {"target_modules": "all-linear"}),
}


# Has products of linear cells, of experts and of an embedding; what else trains is the same in float32.
IN_GRAPH_MODE = "experts-and-embedding"


@functools.lru_cache(maxsize=None)
def losses(feature, held, product_dtype="float32"):
    """The losses of a tiny model whose weights are numbers of bfloat16 and which holds them so, or in float32.

    Those in float32, which are compared with, need no graph; products in bfloat16 have that of products in float32.
    """
    make, pet = FEATURES[feature]
    network = rounded(make(params_dtype=held))
    ms.set_seed(7)
    adapted = with_adapters(network, **{**PET, "product_dtype": product_dtype, **pet})
    of_graph = held == "bfloat16" and product_dtype == "float32" and feature == IN_GRAPH_MODE
    with contextlib.nullcontext() if of_graph else mcore_in_pynative():
        found = train(adapted, 4)
    assert {parameter.dtype for parameter in adapted.trainable_params()} == {mstype.float32}
    products = [cell for _, cell in adapted.cells_and_names() if isinstance(cell, FrozenExperts)]
    assert len(products) == (2 if held == "bfloat16" and make is not tiny_qwen3 else 0)
    assert all(product.rounds == (product_dtype == "bfloat16") for product in products)
    return found


@pytest.mark.parametrize("feature", FEATURES)
def test_features_compute_what_they_do_on_the_base_in_float32(feature):
    expected, found = (losses(feature, held) for held in ("float32", "bfloat16"))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert found[-1] != found[0]


def test_experts_multiply_in_bfloat16_within_its_rounding():
    feature = "experts-and-embedding"
    expected, found = losses(feature, "float32"), losses(feature, "bfloat16", "bfloat16")
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3)
    # What is rounded may send a token to another expert.
    np.testing.assert_allclose(found, expected, rtol=3e-2)
    assert np.abs(found - expected).max() > 1e-6


def test_several_adapters_train_beside_each_other_on_it():
    from mindlora.training.model.held_weights import hold_weights

    def trained(held):
        network = rounded(tiny_qwen3_moe(params_dtype=held))
        configs = [
            LoraConfig(lora_rank=rank, lora_alpha=8, target_modules=["linear_qkv"], target_parameters=EXPERTS)
            for rank in (2, 3)
        ]
        stack_adapters(network, configs, [1, 2]).set_initial_values()
        hold_weights(network, "float32")
        with mcore_in_pynative():
            return train(network, 4)

    np.testing.assert_allclose(trained("bfloat16"), trained("float32"), rtol=1e-6)


def test_a_reference_multiplies_by_the_same_weights_of_16_bits():
    network = with_adapters(rounded(tiny_qwen3(params_dtype="bfloat16")), **PET)
    reference = reference_network(network)
    assert not [path for path, cell in reference.cells_and_names() if isinstance(cell, LoRACell)]
    held = [cell for _, cell in reference.cells_and_names() if hasattr(cell, "held")]
    assert len(held) == 5 and all(cell.held.holds for cell in held)
    mine = {id(parameter) for parameter in network.get_parameters()}
    assert all(id(parameter) in mine for parameter in reference.get_parameters())
    ids = Tensor(tokens())
    with mcore_in_pynative():
        of_reference, of_network = (Loss(each).set_train(False)(ids, ids).asnumpy() for each in (reference, network))
    np.testing.assert_array_equal(of_reference, of_network)


@pytest.mark.parametrize(
    "keys, pet, message",
    [
        ({"params_dtype": "float16"}, {"product_dtype": "bfloat16"}, "linear cells hold float16: hold the base in bf"),
        ({"params_dtype": "float32"}, {"product_dtype": "bfloat16"}, "linear cells hold float32 or 4-bit weights"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(keys, pet, message):
    network = tiny_qwen3(**{"params_dtype": "bfloat16", **keys})
    with pytest.raises(ConfigError, match=message):
        with_adapters(network, **{**PET, **pet})
