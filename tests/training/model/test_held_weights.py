"""A base that stays in 16 bits while it trains on a CPU: the losses are those of the same weights in float32."""

import json

import mindspore as ms
import numpy as np
import pytest
from mindspore.common import dtype as mstype
from safetensors.numpy import load_file

from mindlora.core.errors import ConfigError
from mindlora.network.tree import lora_cells
from tests.support import tiny_runs
from tests.support.mcore_networks import in_training, tiny_qwen3, train, with_adapters
from tests.support.what_runs import shows

PET = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["linear_qkv", "linear_fc2"], "seed": 3}


@pytest.fixture(autouse=True)
def graph_of_training(mindformers):
    ms.set_context(mode=ms.GRAPH_MODE)
    with in_training():
        yield


def qwen3_losses(held, **keys):
    """The losses of a tiny Qwen3 whose weights are numbers of bfloat16 and which holds them so, or in float32."""
    network = tiny_qwen3(params_dtype=held, **keys)
    # MindFormers 1.8 keeps the state of a dropout as whole numbers.
    weights = [parameter for parameter in network.get_parameters() if "Float" in str(parameter.dtype)]
    assert {str(parameter.dtype) for parameter in weights} == {"BFloat16" if held == "bfloat16" else "Float32"}
    for parameter in weights:
        parameter.set_data(parameter.astype(mstype.bfloat16).astype(parameter.dtype))
    adapted = with_adapters(network, **PET)
    bases = [cell.base for _, cell in lora_cells(adapted)]
    bases += [cell.held for _, cell in adapted.cells_and_names() if hasattr(cell, "held")]
    assert [base.holds for base in bases] == ([True] * 5 if held == "bfloat16" else [False] * 2)
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
    config["model"]["model_config"].update(model, num_layers=2)
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


@pytest.mark.parametrize(
    "keys, pet, message",
    [
        ({}, {"modules_to_save": ["norm"]}, "final_layernorm.weight trains in BFloat16: on a CPU only frozen"),
        ({}, {"target_modules": ["word_embeddings"]}, "word_embeddings.weight is in BFloat16, and a .* cannot compute"),
        ({"params_dtype": "float16"}, {"product_dtype": "bfloat16"}, "linear cells hold float16: hold the base in bf"),
        ({"params_dtype": "float32"}, {"product_dtype": "bfloat16"}, "linear cells hold float32 or 4-bit weights"),
        ({}, {"use_dora": True}, "is in BFloat16, and a DoRAParallelLinear .* cannot compute with it on a CPU"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(keys, pet, message):
    network = tiny_qwen3(**{"params_dtype": "bfloat16", **keys})
    with pytest.raises(ConfigError, match=message):
        with_adapters(network, **{**PET, **pet})
