"""Values of a YAML from the command line."""

import copy

import pytest

from mindlora.core.errors import ConfigError
from mindlora.core.overrides import apply_overrides, keys_and_texts, read_value, set_key, split_overrides

CONFIG = {
    "run_mode": "finetune",
    "model": {"model_config": {"hidden_size": 32}},
    "train_dataset": {"data_loader": {"type": "MindDataset"}},
    "callbacks": [{"type": "LoraCheckpoint", "save_steps": 100}, {"type": "MFLossMonitor"}],
}


def overridden(*words):
    config = copy.deepcopy(CONFIG)
    apply_overrides(config, words)
    return config


@pytest.mark.parametrize(
    "text, value",
    [
        ("3", 3),
        ("-4", -4),
        ("1e-4", 1e-4),
        ("5.0", 5.0),
        ("True", True),
        ("true", True),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('{"type": "AdamW"}', {"type": "AdamW"}),
        ("[1", "[1"),
        (".*wq|.*wv", ".*wq|.*wv"),
        ("", ""),
    ],
)
def test_a_value_has_the_type_that_it_looks_like(text, value):
    assert read_value(text) == value and type(read_value(text)) is type(value)


def test_keys_and_flags_are_set():
    config = overridden(
        *("--epochs", "3", "--device_target=CPU", "--train-dataset-dir", "rows"),
        *("--callbacks.LoraCheckpoint.save_steps", "50", "--callbacks.1.type=Other", "--seed=7"),
        *("--model.model_config.hidden_size", "64", "--optimizer.type", "SGD"),
    )
    assert config["runner_config"] == {"epochs": 3} and config["context"] == {"device_target": "CPU"}
    assert config["callbacks"] == [{"type": "LoraCheckpoint", "save_steps": 50}, {"type": "Other"}]
    assert config["model"]["model_config"] == {"hidden_size": 64} and config["seed"] == 7
    assert config["train_dataset"]["data_loader"]["dataset_dir"] == "rows"
    assert config["optimizer"] == {"type": "SGD"}


def test_dotted_keys_win_over_flags():
    assert overridden("--runner_config.epochs", "3", "--epochs", "2")["runner_config"] == {"epochs": 3}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--a.b"], "--a.b has no value. Write --a.b VALUE."),
        (["a.b", "1"], "Expected a key that starts with --, but got 'a.b': quote a value that has spaces."),
        (["--epochs", "many"], "--epochs is 'many', but it must be a whole number."),
        (["--use_parallel", "yes"], "--use_parallel is 'yes', but it must be True or False."),
        (["--runner_config.epoch", "3"], "--runner_config.epoch: 'epoch' is not a key of runner_config. Did you mean"),
        (["--sed", "3"], "--sed: 'sed' is not a key of the YAML. Did you mean 'seed'"),
        (["--epoch", "3"], "--epoch: 'epoch' is not a key of the YAML. Did you mean 'epochs'"),
        (
            ["--a.b.c", "3"],
            "--a.b.c: 'a' is not a key of the YAML, which has: callbacks, model, run_mode, train_dataset.",
        ),
        (["--callbacks.2.type", "x"], "'2' is not an item of callbacks, which has: 0 LoraCheckpoint, 1 "),
        (["--run_mode.x", "1"], "--run_mode.x: run_mode is 'finetune' and has no keys."),
        (["--parallel_config", '{"data_paralel": 2}'], "'data_paralel' is not a key of parallel_config. Did you mean"),
        (["--pet_config.lora_rank", "8"], "train_dataset. Write --model.model_config.pet_config."),
    ],
)
def test_what_cannot_be_set_is_one_error(words, message):
    with pytest.raises(ConfigError) as caught:
        overridden(*words)
    assert str(caught.value).startswith(message) or message in str(caught.value)


def test_nodes_of_training_are_made_in_training_alone():
    assert overridden("--recompute_config.recompute", "True")["recompute_config"] == {"recompute": True}
    with pytest.raises(ConfigError, match="'recompute_config' is not a key of the YAML"):
        overridden("--run_mode", "predict", "--recompute_config.recompute", "True")


def test_one_of_several_items_of_a_type_is_named_by_its_number():
    config = {"callbacks": [{"type": "A"}, {"type": "A"}]}
    with pytest.raises(ConfigError, match="callbacks has A at 0 and 1: name one by its number"):
        set_key(config, "callbacks.A.x", 1, "--callbacks.A.x")


def test_keys_of_the_yaml_are_told_from_misspelled_options():
    words = ["--a.b", "1", "--typo", "x", "--c.d=2", "3", "--e.f", "-4", "--device_id", "1", "--load_ckpt_format", "x"]
    overrides = ["--a.b", "1", "--c.d=2", "--e.f", "-4", "--device_id", "1", "--load_ckpt_format", "x"]
    assert split_overrides(words) == (overrides, ["--typo", "x", "3"])
    assert list(keys_and_texts(overrides))[:2] == [("a.b", "1"), ("c.d", "2")]


def test_a_pet_config_is_made_where_the_yaml_has_none():
    pet = "--model.model_config.pet_config"
    config = overridden(f"{pet}.pet_type", "lora", f"{pet}.lora_rank", "8")
    assert config["model"]["model_config"]["pet_config"] == {"pet_type": "lora", "lora_rank": 8}


def test_nodes_that_the_caller_names_are_made():
    config = {}
    set_key(config, "pet_config.lora_init", "pissa", "--pet_config.lora_init", create=True, nodes=("pet_config",))
    assert config == {"pet_config": {"lora_init": "pissa"}}
    with pytest.raises(ConfigError, match="'pet_confg' is not a key of the YAML"):
        set_key(config, "pet_confg.lora_init", "pissa", "--x", create=True, nodes=("pet_config",))


class Node(dict):
    """A node that is read by attribute, as MindFormers' own."""


def test_a_node_is_of_the_kind_that_it_stands_in():
    config = Node(parallel=Node(), callbacks=[{"type": "A"}])
    set_key(config, "parallel", {"parallel_mode": 0, "strategy": {"file": "x"}, "list": [{"a": 1}]}, "--parallel")
    set_key(config, "callbacks.A.node", {"b": 2}, "--callbacks.A.node")
    kinds = [type(config["parallel"]), type(config["parallel"]["strategy"]), type(config["parallel"]["list"][0])]
    assert kinds == [Node, Node, dict] and type(config["callbacks"][0]["node"]) is dict
    assert config["parallel"] == {"parallel_mode": 0, "strategy": {"file": "x"}, "list": [{"a": 1}]}
