"""YamlRun: how long a fact holds, and which model it is of."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import save_file

from mindlora.run.yaml_run import YamlRun


def test_a_fact_is_of_the_mapping_as_it_was_when_it_was_first_asked_for():
    config = {"run_mode": "finetune", "use_parallel": True, "parallel": {"parallel_mode": 0}}
    run = YamlRun(config)
    assert run.accumulates_here and not run.is_sharded
    config["parallel"]["parallel_mode"] = 1
    assert run.accumulates_here and run.at("parallel.parallel_mode") == 1
    assert not YamlRun(config).accumulates_here and YamlRun(config).is_sharded
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.config = {}


def test_a_base_is_opened_once(tmp_path):
    path = tmp_path / "trained.safetensors"
    weight = np.zeros((2, 2), np.float32)
    save_file({f"model.layers.0.attention.wq.{name}": weight for name in ("weight", "mindpet_delta_lora_a")}, path)
    config = {"run_mode": "finetune", "load_checkpoint": str(path)}
    run = YamlRun(config)
    assert run.base_is_safetensors and run.base_holds_adapter
    path.unlink()
    assert run.base_holds_adapter and not YamlRun(config).base_holds_adapter


def test_what_a_yaml_does_not_say_is_what_mindformers_takes():
    run = YamlRun({})
    assert (run.setting("context.device_target"), run.rows, run.accumulation, run.parallel_mode) == ("Ascend", 1, 1, 1)
    assert run.at("context.device_target") is None and not run.on_cpu and run.in_graph_mode
    assert (run.trains, run.lora, run.train_data, run.callbacks) == (False, None, None, [])


@pytest.mark.parametrize("outer", (None, {"pet_type": "lora", "target_modules": "all-linear"}))
def test_the_language_model_is_the_one_with_the_adapter(outer):
    inner = {"arch": {"type": "LlamaForCausalLM"}, "model_config": {"pet_config": {"pet_type": "lora"}}}
    run = YamlRun({"run_mode": "finetune", "model": {"model_config": {"llm_model": inner, "pet_config": outer}}})
    if outer:
        assert run.language is run and run.language_key == "model.model_config"
    else:
        assert run.language.model_class == "LlamaForCausalLM" and run.language.trains
        assert run.language_key == "model.model_config.llm_model.model_config"


def test_data_that_is_not_there_is_left_out(tmp_path):
    rows = tmp_path / "rows.mindrecord"
    rows.touch()
    held_out = [{"type": "HeldOutLoss", "dataset_dir": str(path)} for path in (tmp_path / "none", rows)]
    adapters = [{"data": str(tmp_path / "none")}, {"name": "shared"}, {"data": str(rows)}]
    loader = {"type": "MindDataset", "dataset_dir": str(tmp_path / "none")}
    run = YamlRun(
        {
            "callbacks": [{"type": "ProgressBar"}, *held_out],
            "train_dataset": {"data_loader": loader, "input_columns": "input_ids"},
            "model": {"model_config": {"pet_config": {"adapters": adapters}}},
        }
    )
    assert run.held_out_data == [("callbacks.HeldOutLoss (2 of 2)", str(rows))]
    assert run.data_of_adapters == [("model.model_config.pet_config.adapters[2].data", str(rows))]
    assert run.train_data is None and run.columns == ["input_ids"]
