"""What a trial changes of a YAML, which rows it makes up, and what it refuses to try."""

import copy
import os

import pytest

from mindlora.core.errors import ConfigError
from mindlora.core.yaml_file import PET, merged, value_at
from mindlora.run.plan.division import Division
from mindlora.run.plan.trial import trial_yaml, try_rank, with_devices
from mindlora.run.yaml_run import YamlRun
from tests.support.planned_runs import LORA, TINY, yaml_of

ON_ASCEND = {"context": {"device_target": "Ascend"}}
DATA = {"train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": ""}}}


def run_yaml(*changes):
    config = merged(yaml_of(), {**ON_ASCEND, **copy.deepcopy(DATA)})
    for change in changes:
        config = merged(config, change)
    return config


def test_the_trial_has_no_base_saves_nothing_and_leaves_the_yaml_as_it_is(tmp_path):
    callbacks = [{"type": "LoraCheckpoint", "save_steps": 5}, {"type": "RunReport", "directory": "report"}]
    config = run_yaml({"load_checkpoint": "base", "output_dir": "out", "callbacks": callbacks})
    config["train_dataset"]["data_loader"]["dataset_files"] = "gone.mindrecord"
    before = copy.deepcopy(config)
    tried, _ = trial_yaml(config, str(tmp_path))
    assert config == before
    assert tried["load_checkpoint"] == "" and tried["callbacks"] == [{"type": "RunReport"}]
    assert tried["output_dir"].startswith(str(tmp_path))
    assert not os.listdir(tmp_path)


def test_rows_are_made_up_where_the_data_is_not_there(tmp_path):
    parts = {"runner_config": {"batch_size": 3, "gradient_accumulation_steps": 2}}
    division = {"use_parallel": True, "parallel": {"parallel_mode": 0}, "parallel_config": {"data_parallel": 4}}
    tried, rows = trial_yaml(run_yaml(parts, division), str(tmp_path))
    ((path, made),) = rows.items()
    assert value_at(tried, "train_dataset.data_loader.dataset_dir") == path
    width = TINY["seq_length"] + 1
    assert made["columns"] == {"input_ids": [width], "labels": [width]}
    assert made["count"] == 2 * 3 * 2 * 4 and made["tokens"] == TINY["vocab_size"]


def test_data_that_is_there_is_taken_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.mindrecord").touch()
    data = {"train_dataset": {"data_loader": {"dataset_dir": "rows.mindrecord"}}}
    tried, rows = trial_yaml(run_yaml(data), str(tmp_path / "trial"))
    assert not rows
    assert value_at(tried, "train_dataset.data_loader.dataset_dir") == str(tmp_path / "rows.mindrecord")


@pytest.mark.parametrize(
    "loss, columns",
    [
        ({"loss": "dpo"}, {"pairs": [1]}),
        ({"loss": "kto"}, {"judgments": [1]}),
        ({"loss": "dpo", "precomputed_reference": True}, {"pairs": [1], "reference": [2, TINY["seq_length"] + 1]}),
    ],
)
def test_preferences_are_made_up_with_the_columns_of_their_loss(loss, columns, tmp_path):
    wrapper = {"runner_wrapper": {"type": "LoraTrainOneStepCell", "preference": loss}}
    (made,) = trial_yaml(run_yaml(wrapper), str(tmp_path))[1].values()
    shape = [2, TINY["seq_length"] + 1]
    assert made["columns"] == {"input_ids": shape, "labels": shape, "answers": shape, **columns}


def test_held_out_data_and_the_data_of_each_adapter_are_made_up_too(tmp_path):
    adapters = [{"data": "gone.mindrecord"}, {}]
    pet = {"model": {"model_config": {"pet_config": {**LORA, "adapters": adapters}}}}
    held_out = {"callbacks": [{"type": "HeldOutLoss", "dataset_dir": "gone"}]}
    tried, rows = trial_yaml(run_yaml(pet, held_out), str(tmp_path))
    (path,) = rows
    assert tried["callbacks"][0]["dataset_dir"] == path
    assert [adapter.get("data") for adapter in value_at(tried, f"{PET}.adapters")] == [path, None]


def test_an_initialization_that_reads_the_base_is_left_out(tmp_path):
    pet = {"model": {"model_config": {"pet_config": {**LORA, "lora_init": "pissa"}}}}
    assert "lora_init" not in value_at(trial_yaml(run_yaml(pet), str(tmp_path))[0], PET)


def test_without_micas_initialization_its_b_still_stays_as_it_is(tmp_path):
    changes = {"lora_init": "mica", "freeze_include": ["*norm*"]}
    pet = {"model": {"model_config": {"pet_config": {**LORA, **changes}}}}
    tried = value_at(trial_yaml(run_yaml(pet), str(tmp_path))[0], PET)
    assert "lora_init" not in tried and tried["freeze_include"] == ["*norm*", "*_lora_b"]


def test_the_weights_of_a_models_folder_are_left_out(tmp_path):
    folder = tmp_path / "Qwen3"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        (folder / name).touch()
    tried, _ = trial_yaml(run_yaml({"pretrained_model_dir": str(folder)}), str(tmp_path / "trial"))
    assert os.listdir(tried["pretrained_model_dir"]) == ["config.json"]


def test_a_column_that_cannot_be_made_up_is_an_error(tmp_path):
    columns = {"train_dataset": {"input_columns": ["input_ids", "pixels"]}}
    with pytest.raises(ConfigError, match="input_columns has pixels.*--train_dataset_dir PATH"):
        trial_yaml(run_yaml(columns), str(tmp_path))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"context": {"device_target": "CPU"}}, "context.device_target is CPU.* Set it to Ascend"),
        ({"context": {"mode": 1}}, "PyNative mode"),
        ({"run_mode": "predict"}, "run_mode is 'predict', and only training is tried"),
    ],
)
def test_what_is_not_trained_on_ascend_in_graph_mode_is_not_tried(change, message):
    with pytest.raises(ConfigError, match=message):
        try_rank(run_yaml(change))


def test_other_devices_have_rows_of_their_own():
    divided = {"use_parallel": True, "parallel": {"parallel_mode": 1}, "parallel_config": {"model_parallel": 2}}
    eight = Division.of_yaml(YamlRun(with_devices(run_yaml(divided), 8)))
    assert (eight.data, eight.model, eight.devices) == (4, 2, 8)
    assert Division.of_yaml(YamlRun(with_devices(run_yaml(), 8))).data == 8
    assert with_devices(run_yaml(), 1)["use_parallel"] is False
    with pytest.raises(ConfigError, match="--devices is 3.*give a multiple of 2"):
        with_devices(run_yaml(divided), 3)
