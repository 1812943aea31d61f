"""What is wrong in a YAML and would fail only after the network is built: found before, all at once."""

import pytest

from mindlora.cli.doctor.examination import check_yaml
from mindlora.core.errors import ConfigError, ConfigMistakes
from mindlora.core.yaml_file import merged
from mindlora.data.mindrecord import first_rows
from mindlora.run.checks.data_rows import check_rows
from mindlora.run.checks.finding import errors
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch import launcher, preflight
from mindlora.training.run_configuration import plain
from tests.support.runs import LORA_YAML, SIZE_FLAGS, SIZES, VOCABULARY, read_yaml, write_rows, write_yaml


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "train.mindrecord", rows=4)
    write_rows(folder / "shifted.mindrecord", rows=4, shift=1)
    write_rows(folder / "eval.mindrecord", rows=4, length=16)
    write_rows(folder / "short.mindrecord", rows=4, length=9)
    # A constant row, of which the last tokens do not count, is one that was padded with its token.
    write_rows(folder / "padded.mindrecord", rows=4, step=0, counted=0.5)
    return folder


def build_config(data, *words):
    train = ["--train_dataset_dir", str(data / "train.mindrecord"), "--batch_size", "4"]
    return launcher.build_config(["--config", LORA_YAML, *SIZE_FLAGS, *train, *words])


def prepare(data, *words):
    preflight.prepare(build_config(data, *words))


def test_a_yaml_without_mistakes_passes(data):
    prepare(data)
    prepare(data, "--run_mode", "eval", "--eval_dataset_dir", str(data / "eval.mindrecord"))


MODEL = "--model.model_config."
HELD_OUT = '[{"type": "MFLossMonitor"}, {"type": "HeldOutLoss", "dataset_dir": "%s"}]'
MISTAKES = {
    "heads": ([f"{MODEL}num_heads", "5", f"{MODEL}n_kv_heads", "5"], "divided: hidden_size 32 by num_heads 5. Corr"),
    "groups": ([f"{MODEL}num_heads", "4", f"{MODEL}n_kv_heads", "3"], "divided: num_heads 4 by n_kv_heads 3. Correc"),
    "callback": (["--callbacks.LoraCheckpoint.type", "LoraChekpoint"], "not registered. Did you mean 'LoraCheckpoint'"),
    "argument": (["--callbacks.LoraCheckpoint.save_step", "5"], "no argument 'save_step'. Did you mean 'save_steps'"),
    "optimizer": (["--optimizer.type", "AdmW"], "optimizer.type is 'AdmW', which is not registered. Did you mean"),
    "schedule": (["--lr_schedule.type", "CosinWithWarmUpLR"], "Did you mean 'CosineWithWarmUpLR'"),
    "length": ([f"{MODEL}seq_length", "8"], "the rows have 17 tokens, and model_config.seq_length 8 needs 9"),
    "vocabulary": ([f"{MODEL}vocab_size", "32"], "and model_config.vocab_size is 32: the data was converted with"),
    "held-out file": (["--callbacks", HELD_OUT % "nowhere.mindrecord"], "HeldOutLoss: dataset_dir is nowhere.mind"),
    "held-out rows": (["--callbacks", HELD_OUT % "{data}/short.mindrecord"], "HeldOutLoss: the rows have 9 tokens"),
    "two held-out files": (
        [
            "--callbacks",
            '[{"type": "HeldOutLoss", "dataset_dir": "{data}/train.mindrecord"},'
            ' {"type": "HeldOutLoss", "dataset_dir": "{data}/train.mindrecord"}]',
        ],
        "callbacks has another HeldOutLoss before the one of '",
    ),
    "metric": (["--callbacks.LoraCheckpoint.best_metric", "held_out_loss"], "but callbacks has no HeldOutLoss"),
    "intervals": (
        [
            "--callbacks",
            '[{"type": "LoraCheckpoint", "best_metric": "held_out_loss", "save_steps": 5},'
            ' {"type": "HeldOutLoss", "dataset_dir": "{data}/train.mindrecord", "every_steps": 2}]',
        ],
        "save_steps is 5, and HeldOutLoss measures every 2 steps",
    ),
    "another metric": (["--callbacks.LoraCheckpoint.best_metric", "heldout_loss"], "Did you mean 'held_out_loss'"),
    "value of a callback": (
        ["--callbacks.LoraCheckpoint.save_steps", "0"],
        "callbacks.LoraCheckpoint: save_steps is 0: it must",
    ),
    "one of two callbacks of a type": (
        ["--callbacks", '[{"type": "LoraCheckpoint"}, {"type": "LoraCheckpoint", "save_steps": 0}]'],
        "callbacks.LoraCheckpoint (2 of 2): save_steps is 0: it must",
    ),
    "missing argument": (
        ["--callbacks", '[{"type": "MFLossMonitor"}, {"type": "HeldOutLoss"}]'],
        "callbacks.HeldOutLoss: HeldOutLoss has neither of dataset_dir",
    ),
    "argument of a schedule": (
        ["--lr_schedule", '{"type": "CosineWithWarmUpLR", "learning_rate": 0.1, "warmup_ration": 0.1}'],
        "lr_schedule has 'warmup_ration', which CosineWithWarmUpLR does not know. Did you mean 'warmup_ratio'",
    ),
    "argument of an optimizer": (["--optimizer.lerning_rate", "1"], "Did you mean 'learning_rate'"),
    "no learning rate": (["--lr_schedule", '{"type": "CosineWithWarmUpLR"}'], "has no learning_rate, which Cosine"),
    "no type": (["--train_dataset_task", '{"dataset_config": 1}'], "train_dataset_task has no type"),
    "loader": (["--train_dataset.data_loader.type", "MindData"], "Did you mean 'MindDataset'"),
    "columns": (["--train_dataset.input_columns", '["tokens", "labels"]'], "names tokens, but "),
    "too few rows": (["--batch_size", "5"], "train_dataset has 4 rows, but a step needs 5"),
    "accumulation": (["--gradient_accumulation_steps", "2"], "a step needs 8 (runner_config.batch_size 4 x runner_"),
    "LoraCheckpoint without LoRA": ([f"{MODEL}pet_config", "null"], "LoraCheckpoint saves adapters, but model_"),
    "padding": (
        ["--train_dataset_dir", "{data}/padded.mindrecord", f"{MODEL}pad_token_id", "3"],
        "but model_config.pad_token_id is 3. Set it to ",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_is_named_with_what_to_change_by_mindlora_run_and_by_doctor(data, name, tmp_path):
    words, message = MISTAKES[name]
    config = build_config(data, *(word.replace("{data}", str(data)) for word in words))
    path = write_yaml(tmp_path, plain(config))
    with pytest.raises(ConfigMistakes) as raised:
        preflight.prepare(config)
    assert message in str(raised.value) and len(raised.value.mistakes) == 1
    assert [str(finding) for finding in errors(check_yaml(path))] == list(raised.value.mistakes)


def test_all_of_them_are_named_at_once_and_doctor_shows_each(data, tmp_path):
    config = read_yaml(LORA_YAML)
    config["model"]["model_config"].update(
        seq_length=8, hidden_size=33, num_heads=4, n_kv_heads=4, vocab_size=VOCABULARY
    )
    config["optimizer"]["type"], config["runner_config"]["batch_size"] = "AdmW", 4
    # MindFormers adds it before the others, so that their numbers are not those of the file.
    config["callbacks"] = [found for found in config["callbacks"] if found["type"] != "MFLossMonitor"]
    next(found for found in config["callbacks"] if found["type"] == "LoraCheckpoint")["keep"] = 1
    config["train_dataset"]["data_loader"]["dataset_dir"] = str(data / "train.mindrecord")
    path = write_yaml(tmp_path, config)
    with pytest.raises(ConfigError) as raised:
        preflight.prepare(launcher.build_config(["--config", str(path)]))
    assert str(raised.value).startswith(
        "4 settings are wrong:\n  - The sizes in model_config cannot be divided: hidden_size 33"
    )
    assert [str(finding) for finding in errors(check_yaml(path))] == list(raised.value.mistakes)


# Not what was meant, but what MindFormers' own YAMLs do too: they have num_block and max_position_embeddings.
WARNINGS = {
    "key of a model": (
        {"model": {"model_config": {"num_block": 512}}},
        "model.model_config has 'num_block', which LlamaConfig does not know. Did you mean 'num_blocks'?",
    ),
    "labels": (
        {"train_dataset": {"input_columns": ["input_ids"]}},
        "train_dataset.input_columns leaves out labels, by which {data}/padded.mindrecord says which tokens count in "
        "the loss: now all do, prompts too. Write input_columns: ['input_ids', 'labels'].",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_what_is_hardly_meant_is_a_warning(data, tmp_path, name):
    changes, message = WARNINGS[name]
    config = merged(read_yaml(LORA_YAML), changes)
    config["model"]["model_config"].update(SIZES)
    config["runner_config"]["batch_size"] = 4
    config["train_dataset"]["data_loader"]["dataset_dir"] = str(data / "padded.mindrecord")
    found = check_yaml(write_yaml(tmp_path, config))
    assert [str(each) for each in found if each.severity == "warning"] == [message.replace("{data}", str(data))]


def test_what_a_run_does_not_build_may_be_of_an_older_mindformers(data):
    run = ("--run_mode", "eval", "--eval_dataset_dir", str(data / "eval.mindrecord"))
    prepare(data, *run, "--optimizer.type", "FP32StateAdamWeightDecay", "--callbacks", '[{"type": "ObsMonitor"}]')


def test_a_chatglm_takes_rows_as_long_as_its_sequence(data):
    """Its labels are shifted in the data: glm4_preprocess.py of MindFormers with the seq_length of its YAML."""
    glm = [f"{MODEL}type", "ChatGLM2Config", "--model.arch.type", "ChatGLM2ForConditionalGeneration"]
    config = launcher.build_config(["--config", LORA_YAML, *SIZE_FLAGS, "--batch_size", "4", *glm])
    config.train_dataset.data_loader.dataset_dir = str(data / "shifted.mindrecord")
    for length in (17, 18):
        config.model.model_config.seq_length = length
        assert list(check_rows(YamlRun(config), first_rows)) == []
    config.model.model_config.seq_length = 16
    (found,) = check_rows(YamlRun(config), first_rows)
    assert str(found).endswith(
        "the rows have 17 tokens, and model_config.seq_length 16 needs 15 or 16. Set seq_length: 17."
    )
    config.model.model_config.seq_length = 17
    config.train_dataset.data_loader.dataset_dir = str(data / "train.mindrecord")
    (found,) = check_rows(YamlRun(config), first_rows)
    assert "each label is the token at its own place, and a ChatGLM learns the labels as they are" in str(found)


def test_a_class_of_the_users_own_is_left_to_mindformers(data):
    own = '[{"type": "Mine", "auto_register": "my_callbacks.Mine", "anything": 1}]'
    prepare(data, "--callbacks", own)
