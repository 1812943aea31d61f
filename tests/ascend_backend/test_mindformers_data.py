"""YAMLs as MindFormers publishes them: rows that its own loader packs, and a model that a folder describes."""

import json
import os

import pytest
import yaml

from mindlora.training.report.history import read_history
from tests.conftest import ROOT
from tests.support.ascend_backend import on_request, run_yaml

QWEN3 = os.path.join(ROOT, "configs/qwen3/lora_qwen3_8b.yaml")
COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids"]
FOLDER = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


def packed_run(folder, column, length):
    """Returns a YAML whose model is described by a folder, and whose loader packs four examples into two rows."""
    with open(QWEN3, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(FOLDER), "utf-8")
    example = list(range(5, 5 + length // 2 - 8))
    examples = [{"input_ids": example, "labels": example}] * 4
    (folder / "examples.json").write_text(json.dumps(examples), "utf-8")
    pet_config = config["model"]["model_config"]["pet_config"]
    dataset = {
        "data_loader": {
            "type": "HFDataLoader",
            "load_func": "load_dataset",
            "path": "json",
            "data_files": str(folder / "examples.json"),
            "split": "train",
            "create_compressed_eod_mask": column == "actual_seq_len",
            "use_broadcast_data": False,
            "handler": [{"type": "PackingHandler", "seq_length": length, "pack_strategy": "pack"}],
        },
        "input_columns": [*COLUMNS, column],
        "construct_args_key": [*COLUMNS, column],
        "drop_remainder": True,
    }
    config.update(
        pretrained_model_dir=str(folder / "model"),
        train_dataset=dataset,
        train_dataset_task={"type": "CausalLanguageModelDataset", "dataset_config": dataset},
        runner_config={"epochs": 1, "batch_size": 1, "sink_mode": True, "sink_size": 1},
    )
    config["model"] = {
        "model_config": {
            "seq_length": length,
            "compute_dtype": "bfloat16",
            "params_dtype": "bfloat16",
            "position_embedding_type": "rope",
            "hidden_dropout": 0.0,
            "pet_config": pet_config,
        }
    }
    return config


# MindFormers compresses masks of at least 2048 tokens.
@pytest.mark.parametrize(
    "column, length", [("attention_mask", 256), pytest.param("actual_seq_len", 2048, marks=on_request)]
)
def test_rows_that_mindformers_packs_train_a_model_that_a_folder_describes(tmp_path, column, length):
    environment = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    run = run_yaml(packed_run(tmp_path, column, length), folder=tmp_path, environment=environment)
    assert run.returncode == 0, run.output[-3000:]
    assert "step:[    2/    2]" in run.output
    assert run.on_cpu == () and (tmp_path / "out/lora_checkpoint/step_2").is_dir()
    # The report says what the device had to hold, not what stays between two steps.
    memory = read_history(str(tmp_path / "out")).series("memory_bytes")[1]
    assert memory[-1] == run.peak_bytes and memory[0] > 0.99 * run.peak_bytes
