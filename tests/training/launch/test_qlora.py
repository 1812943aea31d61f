"""A QLoRA YAML before anything is built: pet_type qlora is expanded, and an adapter compared with its base."""

import pytest

from mindlora import LoraConfig, quantize_checkpoint
from mindlora.core.errors import ConfigError
from mindlora.files.base.convert import convert_base
from tests.support import tiny_runs
from tests.support.llama_checkpoints import llama, save_base

CONFIG = LoraConfig(lora_rank=2, target_modules=["wq", "w2"], quantize_base="nf4", lora_init="loftq_iter_2")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A base in NF4, one that LoftQ made, its adapter, and a base in float."""
    folder = tmp_path_factory.mktemp("qlora")
    source = save_base(folder / "hf", llama())
    paths = {name: str(folder / f"{name}.safetensors") for name in ("nf4", "loftq", "float")}
    quantize_checkpoint(source, paths["nf4"])
    quantize_checkpoint(source, paths["loftq"], adapter=str(folder / "adapter"), config=CONFIG)
    convert_base(source, paths["float"], "hf", "mindformers")
    return {**paths, "adapter": str(folder / "adapter")}


def prepared(checkpoint, **keys):
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch import (
        hooks,  # noqa: F401
        preflight,
    )

    config = tiny_runs.tiny_config("unused", 1, [], load_checkpoint=checkpoint)
    config["model"]["model_config"]["pet_config"].update(keys)
    config = MindFormerConfig(**config)
    preflight.prepare(config)
    return config


def test_qlora_is_expanded_before_anything_else(files):
    config = prepared(files["nf4"], pet_type="qlora")
    pet_config = config.model.model_config.pet_config
    assert (pet_config.pet_type, pet_config.quantize_base) == ("lora", "nf4")
    assert config.load_ckpt_format == "safetensors"
    with pytest.raises(ConfigError, match="is quantized, but pet_config has no quantize_base"):
        prepared(files["nf4"])
    with pytest.raises(ConfigError, match="^quantize_base is 'nf5', which is not known"):
        prepared(files["nf4"], pet_type="qlora", quantize_base="nf5")


def test_where_nobody_writes_it_out_it_is_refused_at_once():
    from mindlora.run.checks.pet_config import refuse_pet_config

    with pytest.raises(ConfigError, match="^pet_type is 'qlora', which only mindlora-run understands"):
        refuse_pet_config({"pet_type": "qlora", "target_modules": "all-linear"})
