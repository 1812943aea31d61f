"""mindlora-run in this process: where each flag ends up in the configuration, and what is refused before a start."""

import os
import re
import signal
import subprocess
import sys

import pytest

import mindlora
from mindlora.core import overrides
from mindlora.core.errors import ConfigError, LoraError
from mindlora.training.launch import command_line, launcher
from tests.support.runs import LORA_YAML, environment

# The flags of MindFormers' run_mindformer.py, and where it puts them

FLAGS = [
    ("mode", "1", "context.mode", 1),
    ("device_id", "3", "context.device_id", 3),
    ("device_target", "Ascend", "context.device_target", "Ascend"),
    ("run_mode", "eval", "run_mode", "eval"),
    ("do_eval", "True", "do_eval", True),
    ("train_dataset_dir", "d", "train_dataset.data_loader.dataset_dir", "d"),
    ("eval_dataset_dir", "d", "eval_dataset.data_loader.dataset_dir", "d"),
    ("load_checkpoint", "c", "load_checkpoint", "c"),
    ("src_strategy_path_or_dir", "s", "src_strategy_path_or_dir", "s"),
    ("auto_trans_ckpt", "True", "auto_trans_ckpt", True),
    ("transform_process_num", "2", "transform_process_num", 2),
    ("only_save_strategy", "true", "only_save_strategy", True),
    ("resume_training", "True", "resume_training", True),
    ("resume_training", "llama_rank_0-2_4.ckpt", "resume_training", "llama_rank_0-2_4.ckpt"),
    ("strategy_load_checkpoint", "s.ckpt", "parallel.strategy_ckpt_load_file", "s.ckpt"),
    ("remote_save_url", "u", "remote_save_url", "u"),
    ("seed", "7", "seed", 7),
    ("use_parallel", "True", "use_parallel", True),
    ("profile", "True", "profile", True),
    ("epochs", "5", "runner_config.epochs", 5),
    ("batch_size", "6", "runner_config.batch_size", 6),
    ("gradient_accumulation_steps", "2", "runner_config.gradient_accumulation_steps", 2),
    ("sink_mode", "True", "runner_config.sink_mode", True),
    ("num_samples", "9", "train_dataset.data_loader.num_samples", 9),
    ("num_samples", "9", "eval_dataset.data_loader.num_samples", 9),
    ("output_dir", "o", "output_dir", "o"),
    ("do_sample", "False", "model.model_config.do_sample", False),
    ("trust_remote_code", "True", "trust_remote_code", True),
]


@pytest.mark.parametrize("flag, given, key, value", FLAGS)
def test_a_flag_lands_where_mindformers_puts_it(flag, given, key, value):
    untouched = launcher.build_config(["--config", LORA_YAML])
    config = launcher.build_config(["--config", LORA_YAML, f"--{flag}", given])
    assert config.get_value(key) == value and type(config.get_value(key)) is type(value)
    assert untouched.get_value(key) != value
    changed = {key for key in set(config) | set(untouched) if config.get(key) != untouched.get(key)}
    sections = {"train_dataset", "eval_dataset"} if flag == "num_samples" else {key.split(".")[0]}
    assert changed - {"train_dataset_task", "eval_dataset_task"} <= sections or flag == "run_mode"


def test_predict_takes_texts_files_and_pictures(tmp_path):
    def predict(*flags):
        return launcher.build_config(["--config", LORA_YAML, "--run_mode", "predict", *flags])

    for name in ("b.png", "a.JPG", "c.txt"):
        (tmp_path / name).write_text("")
    assert predict().input_data is None
    assert predict("--predict_data", r"one\ntwo").input_data == "one\ntwo"
    assert predict("--predict_data", "one", r"two\nthree").input_data == ["one", "two\nthree"]
    assert predict("--predict_data", str(tmp_path)).input_data == [str(tmp_path / "a.JPG"), str(tmp_path / "b.png")]
    assert predict("--predict_data", "x.png", "what?", "--modal_type", "image", "text").input_data == [
        [{"image": "x.png"}, {"text": "what?"}]
    ]
    assert predict("--predict_data", "one", "--predict_batch_size", "2").predict_batch_size == 2
    assert predict("--predict_data", "one", "--adapter_id", "a", "b").adapter_id == ["a", "b"]
    with pytest.raises(ConfigError, match="give each value one type"):
        predict("--predict_data", "x.png", "--modal_type", "image", "text")


def test_a_folder_of_strategies_gives_its_first_ckpt(tmp_path):
    with pytest.raises(ConfigError, match="has no .ckpt file in it"):
        launcher.build_config(["--config", LORA_YAML, "--strategy_load_checkpoint", str(tmp_path)])
    (tmp_path / "s.ckpt").write_text("")
    (tmp_path / "a.json").write_text("")
    config = launcher.build_config(["--config", LORA_YAML, "--strategy_load_checkpoint", str(tmp_path)])
    assert config.parallel.strategy_ckpt_load_file == str(tmp_path / "s.ckpt")


def test_register_path_reaches_mindformers(tmp_path, monkeypatch):
    monkeypatch.setenv("REGISTER_PATH", "")
    monkeypatch.setattr("sys.path", list(os.sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    launcher.build_config(["--config", LORA_YAML, "--register_path", "modules"])
    assert os.environ["REGISTER_PATH"] == str(tmp_path / "modules") == os.sys.path[-1]


@pytest.mark.parametrize("joined", [False, True], ids=["--key value", "--key=value"])
@pytest.mark.parametrize(
    "given, value",
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("True", True),
        ("text", "text"),
        (".*wq|.*wv", ".*wq|.*wv"),
        ("[1, 2]", [1, 2]),
        ("a=b", "a=b"),
    ],
)
def test_any_key_of_the_yaml_can_be_overridden(joined, given, value):
    key = "model.model_config.pet_config.target_modules"
    words = [f"--{key}={given}"] if joined else [f"--{key}", given]
    found = launcher.build_config(["--config", LORA_YAML, *words, "--seed", "3"]).get_value(key)
    assert found == value and type(found) is type(value)


def test_an_item_of_a_list_is_named_by_its_number_or_its_type():
    def callbacks(*words):
        return launcher.build_config(["--config", LORA_YAML, *words]).callbacks

    types = [callback["type"] for callback in callbacks()]
    number = types.index("LoraCheckpoint")
    assert callbacks(f"--callbacks.{number}.resume", "True")[number]["resume"] is True
    assert callbacks("--callbacks.LoraCheckpoint.save_steps", "7")[number]["save_steps"] == 7
    for name, message in (
        ("LoraChekpoint", "'LoraChekpoint' is not an item of callbacks, which has: 0 "),
        (str(len(types)), f"'{len(types)}' is not an item of callbacks"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            callbacks(f"--callbacks.{name}.resume", "True")
    twice = ["--callbacks", f'[{{"type": "{types[0]}"}}, {{"type": "{types[0]}"}}]']
    with pytest.raises(ConfigError, match="at 0 and 1: name one by its number"):
        callbacks(*twice, f"--callbacks.{types[0]}.resume", "True")


def test_resume_lands_in_lora_checkpoint():
    def resume(*words):
        callbacks = launcher.build_config(["--config", LORA_YAML, *words]).callbacks
        return [callback.get("resume") for callback in callbacks if callback["type"] == "LoraCheckpoint"]

    assert resume("--resume") == [True] and resume("--resume", "step_3") == ["step_3"] and resume() == [None]
    with pytest.raises(ConfigError, match="but run_mode is eval"):
        resume("--resume", "--run_mode", "eval")
    with pytest.raises(ConfigError, match="but callbacks has no LoraCheckpoint"):
        resume("--resume", "--callbacks", "[]")


@pytest.mark.parametrize(
    "error, code, line",
    [
        (LoraError("the loss is NaN"), 1, "mindlora-run: error: the loss is NaN"),
        (KeyError("a"), 1, "mindlora-run: error: the run ended with KeyError: 'a'. The traceback is in {folder}"),
        (
            ValueError("first line\n----\nC++ frames"),
            1,
            "mindlora-run: error: the run ended with ValueError: first line. ",
        ),
        (KeyboardInterrupt(), 130, "mindlora-run: interrupted"),
    ],
)
def test_a_run_that_fails_after_a_save_ends_in_one_line_and_says_how_to_go_on(
    tmp_path, monkeypatch, capsys, error, code, line
):
    def fail(config):
        (tmp_path / "saved" / "step_7").mkdir(parents=True, exist_ok=True)
        raise error

    words = ["--config", LORA_YAML, "--callbacks.LoraCheckpoint.directory", str(tmp_path / "saved")]
    words += ["--output_dir", str(tmp_path)]
    monkeypatch.setattr(launcher, "run", fail)
    assert launcher.main(words) == code
    first, last = (line for line in capsys.readouterr().err.splitlines() if line.startswith("mindlora-run:"))
    assert first.startswith(line.format(folder=tmp_path))
    traceback = tmp_path / "log" / "rank_0" / "traceback.txt"
    assert traceback.exists() == ("the run ended with" in first)
    if traceback.exists():
        assert str(traceback) in first and "in fail" in traceback.read_text(encoding="utf-8")
    assert last.endswith(f"saved in {tmp_path}/saved/step_7. To resume from there, repeat the command with --resume.")
    # What an earlier run saved is not this run's.
    os.utime(tmp_path / "saved" / "step_7", (1, 1))
    monkeypatch.setattr(launcher, "run", lambda config: (_ for _ in ()).throw(LoraError("at once")))
    assert launcher.main(words) == 1 and "--resume" not in capsys.readouterr().err


def test_ctrl_c_before_the_training_ends_the_process_with_one_line(tmp_path):
    program = (
        "import time; from mindlora.training.launch import launcher; "
        "launcher.build_config = lambda argv: (print('reading', flush=True), time.sleep(60)); launcher.main([])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # In the background of a shell it would be ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "\nmindlora-run: interrupted\n"
    assert process.returncode == 130


def test_help_version_and_a_wrong_flag_are_answered_at_once_and_write_nothing(tmp_path):
    for words, code, message in (
        (["--help"], 0, "usage: mindlora-run"),
        (["--version"], 0, f"mindlora {mindlora.__version__}"),
        (["--run_mode", "trian"], 1, "invalid choice: 'trian'"),
    ):
        program = (
            "import sys\n"
            "sys.modules['mindspore'] = sys.modules['mindformers'] = None\n"
            "from mindlora.training.launch.launcher import main\n"
            f"sys.exit(main({words}))"
        )
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        assert run.returncode == code and message in run.stdout + run.stderr, run.stderr
    assert not os.listdir(tmp_path)


def test_the_help_has_each_flag_once_and_those_that_only_set_a_key_last(capsys):
    with pytest.raises(SystemExit):
        command_line.parse(["--help"])
    shown = capsys.readouterr().out
    first, _, last = shown.partition("\nset a key of the YAML:\n")
    flags = re.findall(r"^  --(\w+)", shown, re.M)
    assert len(flags) == len(set(flags)) and set(overrides.FLAGS) < set(flags)
    assert all(f"\n  --{flag} " in first for flag in ("config", "run_mode", "train_dataset_dir", "epochs", "resume"))
    keys = re.findall(r"^  --(\w+)", last, re.M)
    assert "seed" in keys and set(keys) < set(overrides.FLAGS)


def test_options_take_pairs():
    config = launcher.build_config(
        [
            "--config",
            LORA_YAML,
            "--options",
            "runner_config.epochs=5",
            "use_parallel=True",
            "do_eval=False",
            "optimizer.betas=[0.8,0.9]",
        ]
    )
    assert (config.runner_config.epochs, config.use_parallel, config.do_eval) == (5, True, False)
    assert config.optimizer.betas == [0.8, 0.9]
    with pytest.raises(ConfigError, match="takes key=value pairs, not 'seed'"):
        launcher.build_config(["--config", LORA_YAML, "--options", "seed"])


@pytest.mark.parametrize(
    "words, message",
    [
        (["--seed", "x"], "--seed: invalid int value: 'x'"),
        (["--use_parallel", "maybe"], "--use_parallel: invalid true_or_false value: 'maybe'"),
        (["--a.b"], "--a.b has no value. Write --a.b VALUE."),
        (["--register_path", "nowhere"], "--register_path nowhere is not a folder"),
        (["--seed.x", "1"], "seed is 42 and has no keys"),
        (["--parallel_config.data_paralel", "2"], "Did you mean 'data_parallel'"),
    ],
)
def test_a_wrong_flag_is_named(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        launcher.build_config(["--config", LORA_YAML, *words])


# What it refuses


def test_a_yaml_that_cannot_be_read_says_why(tmp_path, capsys):
    for text, why in (("runner_config: {epocs: 3}\n", "epocs"), ("a: [\n", "YAML"), ("trainer: {x: 1}\n", "type")):
        path = tmp_path / "wrong.yaml"
        path.write_text(text)
        assert launcher.main(["--config", str(path), "--run_mode", "train"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"mindlora-run: error: --config {path} cannot be read: ") and why in line


def test_a_cpu_predicts_only_with_what_it_has(tmp_path, capsys):
    code = launcher.main(
        [
            "--config",
            LORA_YAML,
            "--run_mode",
            "predict",
            "--random_base",
            "--predict_data",
            "one",
            "--processor.tokenizer.tokenizer_file",
            LORA_YAML,
            "--do_sample",
            "False",
            "--postprocess_use_numpy",
            "False",
            "--output_dir",
            str(tmp_path),
        ]
    )
    line = capsys.readouterr().err
    assert code == 1 and "do_sample: True" in line and "postprocess_use_numpy: True" in line
