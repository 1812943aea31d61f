"""mindlora-run in real processes: trains, evaluates and predicts by a YAML; what is wrong stops it with one line."""

import concurrent.futures
import os
import re

import mindspore as ms
import numpy as np
import pytest
import yaml

from mindlora import load_lora
from mindlora.errors import ConfigError
from mindlora.plugin import launcher
from mindlora.training.held_out import HeldOutLossCell, held_out_loss
from tests.e2e.conftest import TRAINING
from tests.support.runs import LORA_YAML, TINY, files, launch, succeeded

STEPS = 16  # 32 rows in batches of 4, twice


# Training


def test_it_trains_and_saves_the_adapter_alone(trained):
    losses = step_losses(trained.stdout)
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3
    assert files(trained.output) == sorted(
        ["loss_curve.json", "loss_curve.png"]
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


def test_the_adapter_loads_into_a_fresh_network(trained, data, fresh_network):
    network = fresh_network()
    cell = HeldOutLossCell(network, -100)
    before = held_out_loss(cell, str(data.train), 8)
    load_lora(network, str(trained.adapter), on_base_mismatch="error")
    after = held_out_loss(cell, str(data.train), 8)
    # The base alone has the loss that training began with, base and adapter the one that it ended with.
    losses = step_losses(trained.stdout)
    assert abs(before - np.mean(losses[:2])) < 0.2
    assert after < losses[-1] + 0.1 and after < before - 0.3


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
            *TRAINING,
            config=write_yaml(tmp_path, config),
        )
    )
    shapes = 2 * (4 * (32 + 32) + 4 * (32 + 16))
    assert f"trainable params: {shapes:,} " in stdout
    assert len(step_losses(stdout)) == STEPS
    (saved,) = (path for path in files(tmp_path / "output") if "trainable_params" in path and path.endswith(".ckpt"))
    tensors = ms.load_checkpoint(str(tmp_path / "output" / saved))
    names = {
        f"model.layers.{i}.attention.{leaf}.mindpet_delta_lora_{half}"
        for i in range(2)
        for leaf in ("wq", "wv")
        for half in "ab"
    }
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
            *TRAINING,
            config=str(TINY / "lora_llama_tiny_cpu_preset.yaml"),
        )
    )
    rates = [float(rate) for rate in re.findall(r", lr: ([\d.e-]+)", stdout)]
    assert max(rates) == pytest.approx(1e-4, rel=1e-3)
    written = read_yaml(tmp_path / "output" / "lora_checkpoint" / "best" / "adapter_config.json")
    assert (written["r"], written["lora_alpha"], written["lora_dropout"]) == (8, 32, 0.2)


# Evaluation and prediction


def test_eval_judges_base_and_adapter(trained, data, base, tmp_path, fresh_network):
    stdout = succeeded(
        launch(
            tmp_path,
            "--run_mode",
            "eval",
            "--eval_dataset_dir",
            data.eval,
            "--batch_size",
            "4",
            "--load_checkpoint",
            base,
            "--model.model_config.pet_config.adapter_path",
            trained.adapter,
        )
    )
    found = float(re.search(r"'PerplexityMetric': {'loss': ([\d.]+)", stdout)[1])
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
            "--predict_data",
            "one two",
            "three",
            "--processor.tokenizer.tokenizer_file",
            tmp_path / "tokenizer" / "tokenizer.json",
        )
    )
    texts = re.findall(r"'text_generation_text': \['((?:[^'\\]|\\.)*)'\]", stdout)
    assert len(texts) == 2
    for text, start in zip(texts, ("one two", "three")):
        assert text.startswith(start) and len(text) > len(start)


# What is wrong stops with one line

WRONG = {
    "a misspelt pet_type": (
        ["--model.model_config.pet_config.pet_type", "loar"],
        ["pet_type is 'loar'", "Did you mean 'lora'?"],
    ),
    "targets that match nothing": (
        ["--model.model_config.pet_config.target_modules", "q_prj"],
        ["'q_prj' matches no linear cell", "model.layers.{0..1}.attention.wq"],
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
    "a sharded adapter": (
        ["--load_checkpoint", "", "--use_parallel", "True", "--parallel_config.model_parallel", "2"],
        ["LoraCheckpoint and parallel_config.model_parallel is 2"],
    ),
    "no such data": (
        ["--train_dataset_dir", "nowhere.mindrecord"],
        ["nowhere.mindrecord does not exist", "--train_dataset_dir"],
    ),
}


@pytest.fixture(scope="session")
def wrong_runs(data, base, tmp_path_factory):
    """Runs all of WRONG, two at a time: nearly all of their time goes into imports."""

    def run(name):
        folder = tmp_path_factory.mktemp("wrong")
        right = ["--train_dataset_dir", data.train, "--load_checkpoint", base]
        return name, (folder, launch(folder, *right, *WRONG[name][0]))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return dict(pool.map(run, WRONG))


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_stops_with_one_line(name, wrong_runs):
    folder, run = wrong_runs[name]
    assert run.returncode == 1
    (line,) = run.stderr.splitlines()
    assert line.startswith("mindlora-run: error: ")
    for part in WRONG[name][1]:
        assert part in line
    assert not step_losses(run.stdout)
    assert not files(folder / "output")


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


@pytest.mark.parametrize("key", ["model_parallel", "pipeline_stage", "enable_parallel_optimizer"])
def test_an_adapter_that_would_be_cut_is_refused(key):
    from mindlora.plugin import preflight

    config = launcher.build_config(["--config", str(TINY.parent / "llama2" / "lora_llama2_7b.yaml")])
    preflight.prepare(config)
    config = launcher.build_config(
        [
            "--config",
            str(TINY.parent / "llama2" / "lora_llama2_7b.yaml"),
            *(
                ["--parallel.enable_parallel_optimizer", "True"]
                if "optimizer" in key
                else [f"--parallel_config.{key}", "2"]
            ),
        ]
    )
    with pytest.raises(ConfigError, match=rf"LoraCheckpoint and parallel(_config)?\.{key} is (2|True)"):
        preflight.prepare(config)
    config.callbacks = [callback for callback in config.callbacks if callback["type"] != "LoraCheckpoint"]
    preflight.prepare(config)


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


@pytest.mark.parametrize("flag, given, place, value", FLAGS)
def test_a_flag_lands_where_mindformers_puts_it(flag, given, place, value):
    untouched = launcher.build_config(["--config", LORA_YAML])
    config = launcher.build_config(["--config", LORA_YAML, f"--{flag}", given])
    assert config.get_value(place) == value and type(config.get_value(place)) is type(value)
    assert untouched.get_value(place) != value
    changed = {key for key in set(config) | set(untouched) if config.get(key) != untouched.get(key)}
    together = {"train_dataset", "eval_dataset"} if flag == "num_samples" else {place.split(".")[0]}
    assert changed - {"train_dataset_task", "eval_dataset_task"} <= together or flag == "run_mode"


def test_predict_takes_texts_files_and_pictures(tmp_path):
    def predict(*flags):
        return launcher.build_config(["--config", LORA_YAML, "--run_mode", "predict", *flags])

    for name in ("b.png", "a.JPG", "c.txt"):
        (tmp_path / name).write_text("")
    assert predict().input_data is None
    assert predict("--predict_data", r"one\ntwo").input_data == "one\ntwo"
    assert predict("--predict_data", "one", "two").input_data == ["one", "two"]
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
    place = "model.model_config.pet_config.target_modules"
    words = [f"--{place}={given}"] if joined else [f"--{place}", given]
    found = launcher.build_config(["--config", LORA_YAML, *words, "--seed", "3"]).get_value(place)
    assert found == value and type(found) is type(value)


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
        (["--a.b"], "must be pairs"),
        (["--register_path", "nowhere"], "--register_path nowhere is not a folder"),
        (["--seed.x", "1"], "seed is 42 and has no keys"),
        (["--parallel_config.data_paralel", "2"], "Did you mean 'data_parallel'"),
    ],
)
def test_a_wrong_flag_is_named(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        launcher.build_config(["--config", LORA_YAML, *words])


# Helpers


def loss_of(network, tokens):
    """Returns the mean cross entropy of each token but the first, from the network's logits."""
    network.set_train(False)
    logits = network(ms.Tensor(tokens))[0].asnumpy().reshape(*tokens.shape, -1)[:, :-1].astype(np.float64)
    log_sum = np.log(np.exp(logits).sum(-1))
    return (log_sum - np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]).mean()


def step_losses(stdout):
    """Returns the loss of every step that MFLossMonitor printed."""
    return [float(loss) for loss in re.findall(r"loss:\[([\d.]+)/", stdout)]


def read_yaml(path):
    with open(path, encoding="utf-8") as file:
        return yaml.safe_load(file)


def write_yaml(folder, config):
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(path)
