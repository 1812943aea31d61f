"""mindlora plan as a command: its text, its JSON, its exit code, and one clear error for each wrong input."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from mindlora.cli import main
from tests.conftest import ROOT
from tests.support.config_files import PATHS
from tests.support.planned_runs import yaml_of


@pytest.fixture
def plan(tmp_path, capsys):
    """Returns a function that runs ``mindlora plan`` on a YAML's content; returns exit code, stdout and stderr."""

    def run(config, *words):
        path = tmp_path / "run.yaml"
        path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
        code = main(["plan", str(path), *words])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("path", PATHS)
def test_every_yaml_of_ours_is_planned_within_100_columns(path, capsys):
    assert main(["plan", os.path.join(ROOT, path), "--memory", "900GB", "--devices", "2"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        header = file.read()
    trained, total = (
        line.split()[3::2][:2] for line in header.splitlines() if "trainable parameters:" in line
    ).__next__()
    assert f"{total}, of which {trained} are trained" in text


def test_every_figure_says_what_it_rests_on(plan):
    code, text, _ = plan(yaml_of())
    assert code == 0
    table = text.partition("one device")[2].partition("in all")[0].splitlines()[1:]
    assert len(table) >= 6
    assert all(line.endswith(("exact", "model, 15 %", "arithmetic")) for line in table if line.strip())
    for basis in ("exact: ", "model, 15 %: ", "arithmetic: ", "Not counted: "):
        assert f"\n{basis}" in text


def test_json_holds_what_the_text_says(plan):
    _, text, _ = plan(yaml_of(), "--json", "--devices", "1,2")
    report = json.loads(text)
    assert report["parameters"] == 19616 + report["trained"] and report["adapter_file"] > 4 * report["trained"]
    assert [layout["devices"] for layout in report["layouts"]] == [1, 2]
    assert {line["basis"] for line in report["device"]["lines"]} == {"exact", "model, 15 %", "arithmetic"}
    assert report["needed"] == sum(line["size"] for line in report["device"]["lines"]) and report["fit"] is None


def test_the_exit_code_is_1_if_the_run_does_not_fit(plan):
    assert plan(yaml_of(), "--memory", "1GiB")[0] == 0
    code, text, _ = plan(yaml_of(), "--memory", "300KB")
    assert code == 1 and "does not fit" in text


def test_the_command_line_overrides_the_yaml(plan):
    config = {**yaml_of(), "train_dataset": {"data_loader": {"type": "MindDataset"}}}
    words = ["--runner_config.batch_size", "4", "--optimizer.type=SGD", "--recompute_config.recompute", "True"]
    _, text, _ = plan(config, *words, "--train_dataset_dir", "gone")
    assert "4 rows of 16 tokens" in text and "2 states of SGD" in text and "all layers recomputed" in text
    assert "gone holds no MindRecord" in text


def test_it_takes_the_overrides_that_mindlora_run_takes(plan):
    config = {**yaml_of(), "callbacks": [{"type": "LoraCheckpoint", "save_steps": 100}]}
    code, text, _ = plan(config, "--callbacks.LoraCheckpoint.save_steps", "50", "--batch_size", "4", "--epochs=2")
    assert code == 0 and "4 rows of 16 tokens" in text


def test_it_needs_neither_mindspore_nor_mindformers():
    program = (
        "import sys; sys.modules['mindspore'] = sys.modules['mindformers'] = None; from mindlora.cli import main; "
        "sys.exit(main(['plan', 'configs/tiny/lora_llama_tiny_cpu.yaml']))"
    )
    environment = {**os.environ, "PYTHONPATH": ROOT}
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0 and "1,143,936" in run.stdout, run.stderr


MODEL, PET = "model.model_config", "model.model_config.pet_config"
SHARDED = {"use_parallel": True, "parallel.parallel_mode": 1}
# What is put into the YAML, by dotted key, and the error.
WRONG = {
    "an unknown model": (
        {"model.arch": {}, f"{MODEL}.type": "LamaConfig"},
        "The model is 'LamaConfig', whose.*'LlamaConfig'.*Known: .*Qwen3Config",
    ),
    "no model": ({"model.arch": {}, f"{MODEL}.type": None}, "The model is None, whose sizes are not known"),
    "a model that only predicts": ({"model.arch.type": "Glm4ForCausalLM"}, "GLM4 for prediction alone"),
    "no model_config": ({MODEL: None}, "has no model.model_config"),
    "experts": ({"moe_config.expert_num": 4}, "moe_config.expert_num is 4"),
    "a mode that is not known": ({"run_mode": "tune"}, "run_mode is 'tune'"),
    "experts as text": ({"moe_config.expert_num": "4"}, "moe_config.expert_num is '4'"),
    "a value for a node": ({"runner_config": 3}, "runner_config is 3, but it must be a node"),
    "a batch of 0": ({"runner_config.batch_size": 0}, "runner_config.batch_size is 0"),
    "a size as text": (
        {f"{MODEL}.hidden_size": "32"},
        "hidden_size is '32', but it must be a whole number.*Write it without quotes: 32",
    ),
    "a size below 1": ({f"{MODEL}.vocab_size": -64}, "vocab_size is -64, but it must be a whole number of at least 1"),
    "heads": ({f"{MODEL}.num_heads": 5, f"{MODEL}.n_kv_heads": 5}, "hidden_size 32 by num_heads 5"),
    "key heads": ({f"{MODEL}.n_kv_heads": 3}, "num_heads 4 by n_kv_heads 3"),
    "a dtype": ({f"{MODEL}.compute_dtype": "int8"}, "compute_dtype is 'int8'"),
    "model_parallel": ({**SHARDED, "parallel_config.model_parallel": 4}, "n_kv_heads 2 by model_parallel 4"),
    "stages": ({**SHARDED, "parallel_config.pipeline_stage": 3}, "num_layers 2 by pipeline_stage 3"),
    "parallel_config": ({**SHARDED, "parallel_config.data_parallel": "2"}, "parallel_config.data_parallel is '2'"),
    "a key of pet_config": ({f"{PET}.rank": 8}, "pet_config has an unknown key 'rank'"),
    "pet_config": ({PET: "lora"}, "pet_config is 'lora', but it must be a node"),
    "targets": ({f"{PET}.target_modules": ["wx"]}, "target_modules.*matches no linear cell"),
    "4 bits, sharded": ({**SHARDED, f"{PET}.quantize_base": "nf4"}, "parallel_mode: 0"),
    "DoRA, sharded": ({**SHARDED, f"{PET}.use_dora": True}, "use_dora is not supported on sharded cells"),
    "the embedding, sharded": ({**SHARDED, f"{PET}.target_modules": ["tok_embeddings"]}, "LoRA on sharded embeddings"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_yaml_is_one_error(name, plan):
    keys, message = WRONG[name]
    config = yaml_of()
    for key, value in keys.items():
        *parents, leaf = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    assert_one_error(plan(config), message)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--memory", "32"], "--memory is '32'.*32GB or 29.8GiB"),
        (["--memory", "much"], "--memory is 'much'"),
        (["--memory", "0GB"], "--memory is '0GB'"),
        (["--devices", "two"], "--devices is 'two'"),
        (["--devices", "0,1"], r"devices is \[0, 1\]"),
        (["--a.b"], "--a.b has no value"),
        (["--a.b", "1"], "--a.b: 'a' is not a key of the YAML, which has: "),
        (["--run_mode.x", "1"], "--run_mode.x: run_mode is 'finetune' and has no keys"),
        (["--runner_config.epoch", "3"], "'epoch' is not a key of runner_config. Did you mean 'epochs'"),
        (["--epochs", "three"], "--epochs is 'three', but it must be a whole number"),
        (["--model.model_config", "3"], "has no keys below model.model_config"),
    ],
)
def test_a_wrong_command_line_is_one_error(words, message, plan):
    assert_one_error(plan(yaml_of(), *words), message)


def test_a_file_that_is_no_yaml_is_one_error(plan):
    assert_one_error(plan("a: [1"), "is not YAML")


def assert_one_error(outcome, message):
    code, out, error = outcome
    assert code == 1 and not out
    assert error.startswith("mindlora: error: ") and error.count("\n") == 1
    assert re.search(message, error), error


def test_a_run_on_a_cpu_is_not_verified_on_ascend(plan):
    assert_one_error(plan(yaml_of(), "--verify"), "context.device_target is CPU.*Set it to Ascend")


def test_on_an_npu_fragments_are_a_line_and_bytes_that_mindspore_leaves_are_not_filled(plan):
    _, text, _ = plan(yaml_of(context={"device_target": "Ascend"}), "--memory", "16GiB")
    assert re.search(r"fragments of MindSpore's memory pool +0\.\d\d +simulated", text)
    flat = " ".join(text.split())
    assert "16.00 GiB, of which 15.00 can be filled: MindSpore leaves a sixteenth to communication" in flat
