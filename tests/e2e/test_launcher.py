"""mindlora-run in real processes: trains, evaluates and predicts with a YAML; a mistake stops it with one line."""

import re

import mindspore as ms
import numpy as np
import pytest

from mindlora import load_lora
from mindlora.training.held_out.held_out_loss import HeldOutLossCell, held_out_loss
from tests.e2e.conftest import TWO_STEPS
from tests.support.runs import (
    LORA_YAML,
    SEQUENCE,
    TINY,
    evaluated,
    files,
    launch,
    launch_refused,
    loss_of,
    read_yaml,
    step_losses,
    succeeded,
    write_rows,
    write_yaml,
)
from tests.support.what_runs import shows

STEPS = 16  # 32 rows in batches of 4, twice


# Training


@shows("lora", "llama")
def test_it_trains_and_saves_the_adapter_alone(trained):
    losses = step_losses(trained.stdout)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3
    assert files(trained.output) == sorted(
        ["metrics.jsonl", "report.html"]
        + [
            f"lora_checkpoint/{name}"
            for name in (
                "best/adapter_config.json",
                "best/adapter_model.safetensors",
                "best/best.json",
                f"step_{STEPS}/adapter_config.json",
                f"step_{STEPS}/adapter_model.safetensors",
                f"step_{STEPS}/training_state.json",
                f"step_{STEPS}/training_state.safetensors",
            )
        ]
    )
    assert "trainable params: " in trained.stdout
    written = read_yaml(trained.adapter / "adapter_config.json")
    assert written["base_model_name_or_path"] == "someone/a-base"


def test_the_adapter_loads_into_a_fresh_network(trained, data, fresh_network):
    network = fresh_network()
    cell = HeldOutLossCell(network, -100)
    before = held_out_loss(cell, str(data.train), 8)
    load_lora(network, str(trained.adapter), on_base_mismatch="error")
    after = held_out_loss(cell, str(data.train), 8)
    # The base by itself has the loss that training began with; with the adapter, that of the last epoch, the same rows.
    losses = step_losses(trained.stdout)
    assert abs(before - np.mean(losses[:2])) < 0.2
    assert after < np.mean(losses[-STEPS // 2 :]) and after < before - 0.3


def test_a_yaml_of_mindformers_own_lora_needs_no_edit(data, base, tmp_path, fresh_network):
    config = read_yaml(LORA_YAML)
    config["model"]["model_config"]["pet_config"] = {
        "pet_type": "lora",
        "lora_rank": 4,
        "lora_alpha": 16,
        "lora_dropout": 0.05,
        "target_modules": ".*wq|.*wv",
    }
    config["callbacks"] = [
        {"type": "MFLossMonitor"},
        {"type": "CheckpointMonitor", "prefix": "plain", "save_checkpoint_steps": 100, "save_trainable_params": True},
    ]
    stdout = succeeded(
        launch(
            tmp_path,
            "--train_dataset_dir",
            data.train,
            "--load_checkpoint",
            base,
            *TWO_STEPS,
            config=write_yaml(tmp_path, config),
        )
    )
    shapes = 4 * (32 + 32) + 4 * (32 + 16)
    assert f"trainable params: {shapes:,} " in stdout
    assert len(step_losses(stdout)) == 2
    (saved,) = (path for path in files(tmp_path / "output") if "trainable_params" in path and path.endswith(".ckpt"))
    tensors = ms.load_checkpoint(str(tmp_path / "output" / saved))
    names = {f"model.layers.0.attention.{leaf}.mindpet_delta_lora_{half}" for leaf in ("wq", "wv") for half in "ab"}
    assert {name for name in tensors if "model." in name} == names
    assert all(tensors[name].asnumpy().any() for name in names)
    assert not list((tmp_path / "output").rglob("adapter_config.json"))


def test_a_preset_gives_rank_and_learning_rate(data, base, tmp_path):
    stdout = succeeded(
        launch(
            tmp_path,
            "--train_dataset_dir",
            data.train,
            "--load_checkpoint",
            base,
            *TWO_STEPS,
            config=str(TINY / "lora_llama_tiny_cpu_preset.yaml"),
        )
    )
    rates = [float(rate) for rate in re.findall(r", lr: ([\d.e-]+)", stdout)]
    assert max(rates) == pytest.approx(1e-4, rel=1e-3)
    written = read_yaml(tmp_path / "output" / "lora_checkpoint" / "best" / "adapter_config.json")
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (8, 32, 0.2)


# Evaluation and prediction


def test_eval_judges_base_and_adapter_on_rows_as_training_takes_them(trained, data, base, tmp_path, fresh_network):
    # As `mindlora data` writes them, with one token more than MindFormers' evaluation takes.
    rows = tmp_path / "held_out.mindrecord"
    tokens = write_rows(rows, step=5, rows=8, length=SEQUENCE + 1, seed=1)
    assert (tokens[:, :-1] == data.eval_rows).all()
    found = evaluated(tmp_path, rows, base, trained.adapter, mode=0)
    network = fresh_network()
    base_alone = loss_of(network, data.eval_rows)
    load_lora(network, str(trained.adapter))
    assert found == pytest.approx(loss_of(network, data.eval_rows), abs=1e-4)
    assert found < base_alone - 0.3


def test_predict_goes_on_with_a_text(tmp_path):
    from mindlora.data import tokenizers

    tokenizer = tokenizers.train_tokenizer(["one two three four five six seven"] * 2, 270, str(tmp_path / "tokenizer"))
    vocabulary = ["--model.model_config.vocab_size", str(len(tokenizer))]
    stdout = succeeded(
        launch(
            tmp_path,
            *vocabulary,
            "--run_mode",
            "predict",
            "--random_base",
            "--predict_data",
            "one two",
            "three",
            "--processor.tokenizer.tokenizer_file",
            tmp_path / "tokenizer" / "tokenizer.json",
        )
    )
    texts = re.findall(r"'text_generation_text': \['((?:[^'\\]|\\.)*)'\]", stdout)
    assert len(texts) == 2
    assert (tmp_path / "output" / "predict_result.txt").exists() and not list(tmp_path.glob("*result*"))
    for text, start in zip(texts, ("one two", "three")):
        assert text.startswith(start) and len(text) > len(start)


# Mistakes stop it with one line

WRONG = {
    "a misspelt pet_type": (
        ["--model.model_config.pet_config.pet_type", "loar"],
        ["pet_type is 'loar'", "Did you mean 'lora'?"],
    ),
    "a YAML that a CPU cannot run": (
        ["--model.model_config.use_flash_attention", "True", "--model.model_config.compute_dtype", "bfloat16"],
        ["use_flash_attention: False", "compute_dtype: float32"],
    ),
    "an unknown node": (["--modell.model_config.seq_length", "16"], ["'modell' is not a key of the YAML"]),
    "an unknown key": (
        ["--runner_config.epocs", "3"],
        ["'epocs' is not a key of runner_config", "Did you mean 'epochs'?"],
    ),
    "no such YAML": (["--config", "nowhere.yaml"], ["--config nowhere.yaml does not exist"]),
    "a bad run_mode": (["--run_mode", "trian"], ["--run_mode: invalid choice: 'trian'"]),
    "several devices without msrun": (["--use_parallel", "True"], ["this process is alone", "msrun --worker_num=8"]),
    "answers from random weights": (["--load_checkpoint", "", "--run_mode", "eval"], ["--random_base"]),
    "no such data": (
        ["--train_dataset_dir", "nowhere.mindrecord"],
        ["nowhere.mindrecord does not exist", "--train_dataset_dir"],
    ),
}


def right(data, base):
    return ["--train_dataset_dir", data.train, "--load_checkpoint", base]


@pytest.fixture(scope="module")
def refused(data, base, tmp_path_factory):
    """The result of each of WRONG: its folder, exit code and stderr; and what the process printed."""
    folder = tmp_path_factory.mktemp("wrong")
    ended, stdout = launch_refused(folder, *([*right(data, base), *flags] for flags, _ in WRONG.values()))
    return {name: (folder / str(number), *ended[number]) for number, name in enumerate(WRONG)}, stdout


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_stops_with_one_line(name, refused):
    (output, code, stderr), stdout = refused[0][name], refused[1]
    assert_refused(code, stderr, stdout, output, WRONG[name][1])


def test_targets_that_match_nothing_stop_the_process_with_one_line(data, base, tmp_path):
    """Unlike the above, this is found only when the network has been built."""
    flags = ["--model.model_config.pet_config.target_modules", "q_prj"]
    run = launch(tmp_path, *right(data, base), *flags)
    parts = ["'q_prj' matches no linear cell", "model.layers.0.attention.wq"]
    assert_refused(run.returncode, run.stderr, run.stdout, tmp_path / "output", parts)


def assert_refused(code, stderr, stdout, output, parts):
    """Asserts that a launch ended with one line that holds ``parts``, and that it trained and wrote nothing."""
    assert code == 1
    (line,) = stderr.splitlines()
    assert line.startswith("mindlora-run: error: ")
    for part in parts:
        assert part in line
    assert not step_losses(stdout)
    assert not files(output)
