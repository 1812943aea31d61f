"""A QLoRA YAML before anything is built: pet_type qlora is expanded, and an adapter compared with its base."""

import pytest

from mindlora import LoraConfig, quantize_checkpoint
from mindlora.adapters import files as adapter_files
from mindlora.base.convert import convert_base
from mindlora.errors import ConfigError
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

    from mindlora.plugin import hooks, preflight  # noqa: F401

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
    from mindlora.plugin.pet_config import check_pet_config

    with pytest.raises(ConfigError, match="^pet_type is 'qlora', which only mindlora-run understands"):
        check_pet_config({"pet_type": "qlora", "target_modules": "all-linear"})


@pytest.mark.parametrize(
    "base, adapter, warned",
    [("loftq", "adapter", False), ("nf4", "adapter", True), ("nf4", "unmarked", False), ("nf4", "of float", False)],
)
def test_an_adapter_is_held_against_the_quantized_base(base, adapter, warned, files, tmp_path, caplog):
    path = files["adapter"]
    if adapter != "adapter":
        # PEFT's own adapter, or one of a float base, which load_lora warns about.
        given = adapter_files.read(path)
        given.fingerprint = {"shapes": "0", "values": "0"} if adapter == "of float" else None
        path = str(tmp_path / "other")
        adapter_files.write(given, path)
    prepared(files[base], pet_type="qlora", adapter_path=path, target_modules=["wq", "w2"])
    assert (
        f"adapter_path: {path} was made for another quantized base than load_checkpoint: {files[base]}." in caplog.text
    ) == warned


def test_what_the_base_does_not_quantize_is_not_compared(files, tmp_path, caplog):
    given = adapter_files.read(files["adapter"])
    quantize_checkpoint(files["float"], str(tmp_path / "q.safetensors"), ["w2"])
    given.fingerprint = {**given.fingerprint, "values": "0"}
    adapter_files.write(given, str(tmp_path / "other"))
    prepared(
        str(tmp_path / "q.safetensors"),
        pet_type="qlora",
        adapter_path=str(tmp_path / "other"),
        quantize_exclude=["w2"],
        target_modules=["wq", "w2"],
    )
    assert "another quantized base" not in caplog.text
