"""MindFormers' own way to data: a Qwen3 that a folder describes, on JSON that HFDataLoader packs as the run begins."""

import json
import shutil

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from mindlora.training.report.history import read_history
from tests.support import tiny_runs
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.mcore_networks import TINY
from tests.support.what_runs import shows

LENGTH, COLUMNS = 1024, ["input_ids", "labels", "loss_mask", "position_ids"]
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
MODEL = {
    **{key: TINY[key] for key in (*SIZES, "head_dim")},
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "vocab_size": 400,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
OWN = ("params_dtype", "compute_dtype", "layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype")
OWN += ("attention_dropout", "hidden_dropout", "position_embedding_type", "pad_token_id")
SEE_EACH_OTHER = "so the examples of a row see each other"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder and two JSON files of Alpaca's form."""
    made = tmp_path_factory.mktemp("hugging-face")
    chat_tokenizer(CHATML).save_pretrained(made / "model")
    (made / "model" / "config.json").write_text(json.dumps(MODEL), "utf-8")
    for name, count in (("train", 8), ("held_out", 4)):
        rows = [{"instruction": f"cats {i}", "input": "", "output": f"dogs {i} there"} for i in range(count)]
        (made / f"{name}.json").write_text(json.dumps(rows), "utf-8")
    return made


def loader(path, masked):
    """Returns the node of a loader, as MindFormers' finetune_qwen3.yaml has it."""
    tokenizer = {"trust_remote_code": True, "padding_side": "right"}
    handlers = [
        {"type": "AlpacaInstructDataHandler", "seq_length": LENGTH, "padding": False, "tokenizer": tokenizer},
        {"type": "PackingHandler", "seq_length": LENGTH, "pack_strategy": "pack"},
    ]
    return {
        "type": "HFDataLoader",
        "load_func": "load_dataset",
        "path": "json",
        "data_files": str(path),
        "split": "train",
        "create_attention_mask": masked,
        "create_compressed_eod_mask": False,
        "use_broadcast_data": False,
        "shuffle": False,
        "handler": handlers,
    }


def start(folder, name, masked=False, resume=False):
    """Runs mindlora-run on the data of a folder; returns what it wrote and the folder of its output."""
    columns = [*COLUMNS, "attention_mask"] if masked else COLUMNS
    data = {
        "input_columns": columns,
        "construct_args_key": columns,
        "data_loader": loader(folder / "train.json", masked),
        "num_parallel_workers": 1,
        "python_multiprocessing": False,
        "drop_remainder": True,
    }
    held_out = {"type": "HeldOutLoss", "data_loader": loader(folder / "held_out.json", False), "every_steps": 1}
    saving = {"type": "LoraCheckpoint", "save_steps": 1, "keep_last": 20}
    callbacks = [{**held_out, "batch_size": 1}, saving, {"type": "TrainingGuard"}]
    config = tiny_runs.tiny_config(
        "none",
        2,
        callbacks,
        use_legacy=False,
        pretrained_model_dir=str(folder / "model"),
        train_dataset=data,
        train_dataset_task={"type": "CausalLanguageModelDataset", "dataset_config": data},
    )
    config["runner_config"].update(batch_size=1)
    pet = {"pet_type": "lora", "lora_rank": 4, "lora_alpha": 8, "target_modules": ".*word_embeddings|.*linear_qkv"}
    config["model"] = {"model_config": {**{key: TINY[key] for key in OWN}, "seq_length": LENGTH, "pet_config": pet}}
    path, output = folder / f"{name}.yaml", folder / name
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    arguments = ["-m", "mindlora.training.launch.launcher", "--config", str(path), "--output_dir", str(output)]
    done = tiny_runs.python(arguments + (["--resume"] if resume else []), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr, output


@pytest.fixture(scope="module")
def run(folder):
    """What a run wrote, and its output."""
    return start(folder, "whole")


def last(output):
    return max((output / "lora_checkpoint").glob("step_*"), key=lambda path: int(path.name.rpartition("_")[2]))


@shows("hugging_face_data", "qwen3")
def test_packed_rows_train_and_are_measured_and_a_line_says_that_examples_see_each_other(run):
    said, output = run
    assert SEE_EACH_OTHER in said
    history = read_history(str(output))
    steps, losses = history.series("loss")
    assert len(steps) >= 4 and losses[-1] < losses[0]
    measured = history.series("held_out_loss")[1]
    assert len(measured) == len(steps) and measured[-1] < measured[0]
    assert (output / "report.html").is_file()


def test_a_resumed_run_is_the_same_run(run, folder):
    output = folder / "resumed"
    shutil.copytree(run[1], output)
    end = last(run[1]).name
    for path in (output / "lora_checkpoint").iterdir():
        if path.name != "step_1":
            shutil.rmtree(path)
    start(folder, "resumed", resume=True)
    whole, resumed = (load_file(last(folder) / "training_state.safetensors") for folder in (run[1], output))
    assert last(output).name == end and whole.keys() == resumed.keys()
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)


def test_with_a_mask_the_examples_of_a_row_do_not_see_each_other(run, folder):
    said, output = start(folder, "masked", masked=True)
    assert SEE_EACH_OTHER not in said
    whole, masked = (read_history(str(each)).series("loss")[1] for each in (run[1], output))
    assert len(whole) == len(masked) and np.abs(whole - masked).max() > 1e-6
