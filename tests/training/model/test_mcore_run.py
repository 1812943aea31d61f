"""mindlora-run on a YAML of one of MindFormers' mcore models: the whole run on a CPU, and refusals."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.core.errors import ConfigError
from mindlora.files.base.convert import convert_base
from mindlora.models.architectures import registry
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.mcore import check_mcore
from mindlora.run.yaml_run import YamlRun
from mindlora.training.report.history import read_history
from tests.support import mcore_checkpoints, tiny_runs
from tests.support.llama_checkpoints import save_base
from tests.support.mcore_networks import tiny_config
from tests.support.what_runs import shows

PET = {
    "lora_rank": 3,
    "lora_alpha": 6,
    "lora_dropout": 0.1,
    "target_modules": "all-linear",
    "modules_to_save": ["norm"],
}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The output folder of a run of eight steps of two micro-batches on a tiny Qwen3."""
    folder = tmp_path_factory.mktemp("mcore")
    data = str(folder / "data.mindrecord")
    tiny_runs.write_data(data, 32)
    callbacks = [
        {"type": "AdapterHealth", "every_steps": 4},
        {"type": "LoraCheckpoint", "save_steps": 4, "keep_last": 2},
    ]
    config = tiny_config(data, 2, callbacks, PET)
    config["runner_config"]["gradient_accumulation_steps"] = 2
    result = tiny_runs.launch(config, folder / "output")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return folder / "output"


@shows("lora", "qwen3")
@shows("saved_modules", "qwen3")
def test_it_trains_and_saves_an_adapter_under_hugging_faces_names(output):
    losses = tiny_runs.losses(output)
    assert sorted(losses) == list(range(1, 9)) and losses[8] < losses[1] - 0.02
    folder = output / "lora_checkpoint" / "step_8"
    tensors = load_file(folder / "adapter_model.safetensors")
    ends = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    ends += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    cells = [f"base_model.model.model.layers.0.{end}" for end in ends]
    assert set(tensors) == {f"{cell}.lora_{half}.weight" for cell in cells for half in "AB"} | {
        "base_model.model.model.norm.weight"
    }
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (3, 6, ["model.norm"])


@shows("held_out", "qwen3")
def test_the_health_of_the_adapters_is_measured(output):
    """The held-out loss of a run is in test_packing and in tests/e2e."""
    (first, last) = read_history(str(output)).health
    assert (first["step"], last["step"]) == (4, 8)
    measures = last["health"]["cells"]["decoder.layers.0.mlp.linear_fc1"]["parts"]
    assert all(part["gradient_norm"] > 0 and part["update"] > 0 for part in measures.values())


@shows("whole", "qwen3")
def test_a_whole_model_trains_and_becomes_a_folder_of_hugging_faces(tmp_path):
    tiny_runs.write_data(tmp_path / "data.mindrecord", 32)
    save = {"type": "CheckpointMonitor", "prefix": "whole", "save_checkpoint_steps": 100, "save_optimizer": False}
    config = tiny_config(tmp_path / "data.mindrecord", 2, [save], {})
    model = config["model"]["model_config"]
    del model["pet_config"]
    result = tiny_runs.launch(config, tmp_path / "output")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    losses = tiny_runs.losses(tmp_path / "output")
    assert losses[max(losses)] < losses[1] - 0.02
    (saved,) = (tmp_path / "output" / "checkpoint" / "rank_0").glob("whole*.safetensors")
    report = convert_base(str(saved), str(tmp_path / "hf"), None, "hf", heads=4, kv_heads=2, model_config=model)
    # The state of the step and of the optimizer is left out.
    assert "transient_learning_rate_factor" in load_file(saved) and "Left out, as training's" in str(report)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert len(tensors) == 3 + 11 and not any("transient" in name for name in tensors)
    # Whatever began as ones has been trained too.
    assert not any(np.all(array == 1) for array in tensors.values())


# What is refused before anything is built ------------------------------------------------------------------------


def yaml_of(**changes):
    """Returns the YAML of a Qwen3, for Ascend."""
    config = tiny_config(
        "data", 1, [], {"target_modules": "all-linear"}, context={"mode": 0, "device_target": "Ascend"}
    )
    config["model"]["model_config"].update(changes.pop("model", {}))
    return {**config, **changes}


def message(config):
    with pytest.raises(ConfigError) as error:
        refuse(check_mcore(YamlRun(config)))
    return str(error.value)


@pytest.mark.parametrize("family", registry.trained_mcore_classes().values())
def test_the_families_that_train_pass(family):
    assert not list(check_mcore(YamlRun(yaml_of(model={"architectures": [family]}))))


def test_a_classifier_passes_and_a_legacy_one_does_not():
    assert not list(check_mcore(YamlRun(yaml_of(model={"architectures": "Qwen3ForTokenClassification"}))))
    assert "the model is LlamaForTokenClassification" in message(
        yaml_of(model={"architectures": "LlamaForTokenClassification"})
    )


def test_another_family_is_refused_in_one_sentence_that_names_those_that_train():
    config = yaml_of(model={"architectures": "Glm4ForCausalLM", "model_type": "glm4"})
    assert message(config) == (
        "use_legacy is False and the model is Glm4ForCausalLM: of MindFormers' mcore models, mindlora trains adapters "
        "on Qwen3ForCausalLM, Qwen3MoeForCausalLM, DeepseekV3ForCausalLM. Remove pet_config, or name one of these in "
        "model.model_config.architectures. docs/mcore.md says which mcore models train with adapters."
    )
    config = yaml_of(model={"architectures": "Qwen2ForCausalLM", "model_type": "qwen2"})
    assert message(config).endswith("Qwen2 trains with use_legacy: True, as LlamaForCausalLM with qkv_has_bias: True.")
    assert "the model is not named" in message(yaml_of(model={"architectures": None, "model_type": None}))


def test_pynative_and_another_run_mode_are_refused():
    assert message(yaml_of(context={"mode": 1, "device_target": "Ascend"})).startswith("context.mode is 1 and use_leg")
    assert message(yaml_of(run_mode="predict")).startswith("run_mode is 'predict' and use_legacy is False")
    assert not list(check_mcore(YamlRun(yaml_of(run_mode="eval"))))


def test_mindformers_loads_no_folder_of_hugging_faces_on_one_device(tmp_path):
    """What mindlora loads itself passes: safetensors that are the base of a training run."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"weights")
    assert message(yaml_of(load_checkpoint=str(tmp_path))) == (
        f"load_checkpoint: {tmp_path} is a folder of Hugging Face's, which MindFormers cannot load into an mcore model "
        f"on one device. Convert it once: mindlora base convert {tmp_path} base.safetensors --to mcore"
    )
    assert not list(check_mcore(YamlRun(yaml_of(load_checkpoint=str(tmp_path), use_parallel=True))))
    save_base(tmp_path / "base", mcore_checkpoints.qwen3(), **mcore_checkpoints.CONFIG)
    assert not list(check_mcore(YamlRun(yaml_of(load_checkpoint=str(tmp_path / "base")))))


def test_the_model_is_found_in_a_folder_of_hugging_faces(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    config = yaml_of(model={"architectures": None, "model_type": None}, pretrained_model_dir=str(tmp_path))
    assert YamlRun(config).family == "Qwen3MoeForCausalLM"
    (tmp_path / "config.json").write_text("[]")
    assert "config.json holds a list" in message(config)


def test_mindlora_run_says_it_in_its_first_line(mindformers, tmp_path, capsys, monkeypatch):
    import yaml

    from mindlora.training.launch import launch_checks, launcher

    monkeypatch.setattr(launch_checks, "_check_device", lambda config: None)
    path = tmp_path / "glm4.yaml"
    path.write_text(yaml.safe_dump(yaml_of(model={"architectures": "Glm4ForCausalLM"})), encoding="utf-8")
    assert launcher.main(["--config", str(path), "--output_dir", str(tmp_path / "output")]) == 1
    assert capsys.readouterr().err.startswith(
        "mindlora-run: error: use_legacy is False and the model is Glm4ForCausalLM"
    )
