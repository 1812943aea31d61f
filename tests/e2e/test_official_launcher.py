"""MindFormers' own launcher, which does not know mindlora: one line in the YAML and --register_path load it."""

import pytest
import yaml
from safetensors.numpy import load_file

from tests.e2e.conftest import TRAINING
from tests.support.runs import LORA_YAML, ROOT, SIZES, files, python, succeeded

REGISTER_PATH = str(ROOT / "mindlora" / "training" / "launch" / "register_path")

# What MindFormers' run_mindformer.py does with --config, --register_path and run_mode finetune.
OFFICIAL = """
import os
import sys

from mindformers.tools.register import MindFormerConfig
from mindformers.core.context import build_context
from mindformers.trainer import Trainer
from mindformers.utils.file_utils import set_output_path

os.environ["REGISTER_PATH"] = sys.argv[2]
sys.path.append(sys.argv[2])
config = MindFormerConfig(sys.argv[1])
assert not [name for name in sys.modules if name.startswith("mindlora")]
set_output_path(config.output_dir)
build_context(config)
trainer = Trainer(config)
trainer.train()
"""


@pytest.fixture
def official(tmp_path, data, base):
    """Returns a function that runs the tiny LoRA YAML with MindFormers' launcher; its arguments change pet_config."""

    def launch(**pet_config):
        (tmp_path / "official.py").write_text(OFFICIAL)
        with open(LORA_YAML, encoding="utf-8") as file:
            config = yaml.safe_load(file)
        config["model"]["model_config"].update(SIZES, auto_register="bridge.LlamaConfig")
        config["model"]["model_config"]["pet_config"].update(pet_config)
        config["runner_config"].update(zip(("batch_size", "epochs"), map(int, TRAINING[1::2])))
        config["train_dataset"]["data_loader"]["dataset_dir"] = str(data.train)
        config["callbacks"].append({"type": "RunReport"})  # mindlora-run adds it
        config.update(load_checkpoint=str(base), output_dir=str(tmp_path / "output"))
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        return python(["official.py", "config.yaml", REGISTER_PATH], tmp_path)

    return launch


def test_it_trains_the_same_adapter_as_mindlora_run(official, trained, tmp_path):
    succeeded(official())
    assert files(tmp_path / "output") == files(trained.output)
    ours = load_file(trained.adapter / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "output" / "lora_checkpoint" / "best" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.parametrize(
    "pet_type, messages",
    [
        ("loar", ["pet_type is 'loar', which is not known", "Did you mean 'lora'?"]),
        (
            "qlora",
            [
                "pet_type is 'qlora', which only mindlora-run understands",
                "write pet_type: lora and quantize_base: nf4.",
            ],
        ),
    ],
)
def test_a_wrong_pet_type_is_an_error_there_too(pet_type, messages, official, tmp_path):
    run = official(pet_type=pet_type)
    assert run.returncode != 0
    assert all(text in run.stderr for text in messages)
    assert "loss:[" not in run.stdout
    assert not files(tmp_path / "output")
