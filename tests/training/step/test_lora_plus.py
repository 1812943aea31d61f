"""LoRA+ from a YAML: B learns at ratio times the rate in MindFormers' own trainer."""

import types

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from mindlora.core.errors import ConfigError
from tests.support import tiny_runs
from tests.support.what_runs import shows

RATIO = 16


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with the plain rates and one with LoRA+: ratio -> (process, adapter after each of two steps)."""
    folder = tmp_path_factory.mktemp("plus")
    tiny_runs.write_data(folder / "rows.mindrecord", 2 * tiny_runs.BATCH_SIZE)
    found = {}
    for ratio in (None, RATIO):
        config = tiny_runs.tiny_config(folder / "rows.mindrecord", 1, [{"type": "LoraCheckpoint", "save_steps": 1}])
        pet = config["model"]["model_config"]["pet_config"]
        # With B not zero, both A and B move in the first step.
        pet["lora_b_init"] = "ones"
        if ratio:
            pet["loraplus_lr_ratio"] = ratio
        process = tiny_runs.launch(config, folder / str(ratio))
        assert process.returncode == 0, process.stderr[-2000:]
        saved = folder / str(ratio) / "lora_checkpoint"
        found[ratio] = types.SimpleNamespace(
            process=process, steps=[load_file(saved / f"step_{step}" / "adapter_model.safetensors") for step in (1, 2)]
        )
    return found


@shows("lora_plus", "llama")
def test_b_moves_ratio_times_as_far_in_a_step_of_the_trainer(runs):
    plain, faster = runs[None].steps[0], runs[RATIO].steps[0]
    assert len(plain) == 4
    for key, array in plain.items():
        if ".lora_A" in key:
            assert array.tobytes() == faster[key].tobytes()
        else:
            assert np.abs(array - 1).max() > 0.009
            np.testing.assert_allclose(faster[key] - 1, RATIO * (array - 1), rtol=0, atol=4e-6)


def test_the_ratio_holds_along_the_schedule(runs):
    """MindFormers prints the rates of its groups; the second of two steps of a cosine is lower."""
    lines = [line for line in runs[RATIO].process.stdout.splitlines() if "group_0_lr: " in line]
    rates = [float(line.partition("group_0_lr: ")[2].partition(",")[0]) for line in lines]
    # A cosine from 0.01 to 0.0002, in the middle.
    np.testing.assert_allclose(rates, [0.16, 16 * 0.0051], rtol=1e-3)
    assert "lora_b" in lines[0] and "lora_a" not in lines[0]
    assert "LoRA+: B learns at 16 times the rate of lr_schedule." in runs[RATIO].process.stdout


def prepared(tmp_path, ratio, **changes):
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch import preflight

    config = tiny_runs.tiny_config("unused", 2, [], **changes)
    config["model"]["model_config"]["pet_config"]["loraplus_lr_ratio"] = ratio
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    config = MindFormerConfig(str(tmp_path / "run.yaml"))
    preflight.prepare(config)
    return config


def test_the_groups(tmp_path):
    config = prepared(tmp_path, 4)
    assert config.grouped_lr_schedule.default == config.lr_schedule
    (group,) = config.grouped_lr_schedule.grouped
    assert group == {
        **config.lr_schedule,
        "params": ["mindpet_delta_lora_b", "mindpet_delta_lora_magnitude"],
        "type": "LoraPlusLR",
        "schedule": "CosineWithWarmUpLR",
        "ratio": 4,
    }
    assert "loraplus_lr_ratio" not in config.model.model_config.pet_config


def test_the_learning_rate_of_a_preset(tmp_path):
    schedule = {"type": "CosineWithWarmUpLR", "warmup_ratio": 0.0, "total_steps": -1}
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch import preflight

    config = tiny_runs.tiny_config("unused", 2, [], lr_schedule=schedule)
    config["model"]["model_config"]["pet_config"].update(preset="small_dataset", loraplus_lr_ratio=2)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    config = MindFormerConfig(str(tmp_path / "run.yaml"))
    preflight.prepare(config)
    assert config.grouped_lr_schedule.grouped[0]["learning_rate"] == 1e-4
    assert config.grouped_lr_schedule.default.learning_rate == 1e-4


def test_evaluation_has_no_learning_rates(tmp_path):
    config = prepared(tmp_path, 4, run_mode="eval")
    assert not config.grouped_lr_schedule and "loraplus_lr_ratio" not in config.model.model_config.pet_config


@pytest.mark.parametrize("ratio", [0, 0.5, -1, "16", True, float("inf")])
def test_a_wrong_ratio(tmp_path, ratio):
    with pytest.raises(ConfigError, match=f"^loraplus_lr_ratio is {ratio!r}: it must be a number of at least 1."):
        prepared(tmp_path, ratio)


def test_a_yaml_with_its_own_groups_is_refused(tmp_path):
    groups = {"default": {"type": "ConstantWarmUpLR"}, "grouped": []}
    with pytest.raises(ConfigError, match="^The YAML has both pet_config.loraplus_lr_ratio and grouped_lr_schedule"):
        prepared(tmp_path, 16, grouped_lr_schedule=groups)


def test_another_launcher_refuses_the_key(make_llama):
    from mindformers.pet import get_pet_model

    from mindlora.training.launch import hooks  # noqa: F401

    with pytest.raises(
        ConfigError, match="^loraplus_lr_ratio is a key that only mindlora-run turns into learning rates."
    ):
        get_pet_model(make_llama(), {"pet_type": "lora", "target_modules": ".*wq", "loraplus_lr_ratio": 16})
