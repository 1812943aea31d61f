"""A YAML without faults, in which tests change one thing: the fixture of tests/checks and tests/doctor."""

import pytest
import yaml

from mindlora.cli.doctor import examination


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes a YAML without faults, with the values of some dotted keys replaced."""
    # What MindFormers and the content of files tell is tested separately: base and data of these YAMLs are empty.
    monkeypatch.setattr(examination, "find_further", lambda path, config, right: [])
    (tmp_path / "base.ckpt").touch()
    (tmp_path / "rows.mindrecord").touch()

    def make(changes=None, name="run.yaml"):
        config = {
            "run_mode": "finetune",
            "load_checkpoint": str(tmp_path / "base.ckpt"),
            "context": {"device_target": "Ascend"},
            "lr_schedule": {"learning_rate": 1e-4},
            "runner_wrapper": {"type": "LoraTrainOneStepCell", "scale_sense": 1.0},
            "train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": str(tmp_path / "rows.mindrecord")}},
            "model": {
                "arch": {"type": "LlamaForCausalLM"},
                "model_config": {
                    "type": "LlamaConfig",
                    "hidden_size": 64,
                    "num_layers": 2,
                    "num_heads": 4,
                    "n_kv_heads": 1,
                    "intermediate_size": 96,
                    "vocab_size": 100,
                    "compute_dtype": "bfloat16",
                    "param_init_type": "bfloat16",
                    "pet_config": {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": ".*wq|.*wv"},
                },
            },
        }
        for path, value in (changes or {}).items():
            *nodes, key = path.split(".")
            node = config
            for part in nodes:
                node = node.setdefault(part, {})
            node[key] = value
        written = tmp_path / name
        written.write_text(yaml.safe_dump(config), encoding="utf-8")
        return str(written)

    return make
