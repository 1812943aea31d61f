"""Features together under MindFormers' PyNative Trainer. One process trains all runs."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.files.adapters import files as adapter_files
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.models.lora_config import LoraConfig
from tests.support import pynative_runs
from tests.support.pynative_runs import BASE_FILE, LORA, LORA_WITH_EXPERTS, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS = 4
MODULES = {"modules_to_save": ["embed_tokens", "q_norm", "k_norm"]}
NF4 = {"quantize_base": "nf4"}
# LoftQ's adapter is in PEFT's form, which has none for joined cells.
NOT_JOINED = {**LORA, "target_modules": r"linear_(proj|fc2)$"}
saves_the_adapter_alone = pytest.mark.skipif(
    pynative_runs.trainer_version() < (2, 1), reason="MindFormers 2.0 saves the base with the adapter"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the bases hf and base; LoftQ's base and adapter, and what both are together in float."""
    folder = tmp_path_factory.mktemp("combinations")
    pynative_runs.write_data(folder / "rows.mindrecord", rows=16)
    pynative_runs.write_base(folder / "base", folder / "hf")
    for name in ("loftq_base", "loftq_in_float"):
        shutil.copytree(folder / "base", folder / name)
    settings = {"lora_rank": LORA["lora_rank"], "lora_alpha": LORA["lora_alpha"], "quantize_base": "nf4"}
    config = LoraConfig(target_modules=".*linear_proj|.*linear_fc2", lora_init="loftq", **settings)
    output, adapter = str(folder / "loftq_base" / BASE_FILE), str(folder / "loftq")
    quantize_checkpoint(str(folder / "hf"), output, overwrite=True, adapter=adapter, config=config)
    adapter = adapter_files.read(adapter)
    tensors = load_file(folder / "base" / BASE_FILE)
    for name in [name for name in tensors if "linear_" in name]:
        tensors[name] = dequantize(quantize(tensors[name]))
        legacy = name.replace("decoder", "model").replace("self_attention.linear_proj.weight", "attention.wo")
        path = legacy.replace("mlp.linear_fc2.weight", "feed_forward.w2")
        if path in adapter.paths:
            tensors[name] += adapter.delta(path)
    save_file(tensors, folder / "loftq_in_float" / BASE_FILE)
    return folder


@pytest.fixture(scope="module")
def messages(folder):
    """Name of a run -> what refused it, or None."""

    def step(name, number=2):
        return str(folder / f"{name}_saved" / f"iteration_{number:08d}")

    def begun(base):
        return {"load_path": str(folder / base), "no_load_optim": True}

    alone = {"save_trainable_only": True, "base_load_path": str(folder / "base")}
    # Name -> lora_config, pet_config, and what is loaded and saved.
    runs = {
        "modules": (LORA, MODULES, begun("base")),
        "modules_resumed": (LORA, MODULES, {"load_path": step("modules")}),
        "loftq": (NOT_JOINED, {**NF4, "adapter_path": str(folder / "loftq")}, begun("loftq_base")),
        "in_float": (NOT_JOINED, {}, begun("loftq_in_float")),
        "experts": (LORA_WITH_EXPERTS, {}, {}),
        "without_experts": (LORA, {}, {"load_path": step("experts", STEPS), "no_load_optim": True}),
    }
    if pynative_runs.trainer_version() >= (2, 1):
        runs["alone"] = (LORA, NF4, {**alone, "load_path": ""})
        runs["alone_resumed"] = (LORA, NF4, {**alone, "load_path": step("alone")})
    configs = []
    for name, (lora, pet_config, checkpoint) in runs.items():
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 2}
        saving = {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(folder / f"{name}_peft")}
        recording = {"type": "RecordLosses", "directory": str(folder / name)}
        nodes = {"checkpoint": {**saved, **checkpoint}, "callbacks": [saving, recording]}
        nodes |= {"lora_config": lora, "pet_config": pet_config}
        model = "deepseek_v3" if "experts" in name else "qwen3"
        configs.append(pynative_runs.tiny_config(model, folder / "rows.mindrecord", STEPS, **nodes))
    return dict(zip(runs, pynative_runs.series(configs, folder)))


def is_the_rest(folder, name):
    whole, resumed = (pynative_runs.losses(folder / run) for run in (name, f"{name}_resumed"))
    arrays, others = (pynative_runs.trained(folder / run) for run in (name, f"{name}_resumed"))
    equal = arrays.keys() == others.keys() and all(np.array_equal(arrays[key], others[key]) for key in arrays)
    return equal and resumed == whole[2:] and len(whole) == STEPS


@shows("saved_modules", "qwen3", trainer="pynative")
def test_an_embedding_and_norms_of_queries_and_keys_are_trained_saved_and_resumed(folder, messages):
    assert messages["modules"] is messages["modules_resumed"] is None
    assert is_the_rest(folder, "modules")
    trained = pynative_runs.trained(folder / "modules")
    tensors = load_file(folder / "modules_peft" / f"step_{STEPS}" / "adapter_model.safetensors")
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
    for layer in (0, 1):
        for half in "qk":
            theirs = f"model.layers.{layer}.self_attn.{half}_norm.weight"
            names[f"decoder.layers.{layer}.self_attention.{half}_layernorm.weight"] = theirs
    base = load_file(folder / "base" / BASE_FILE)
    assert {name for name in trained if "lora" not in name} == names.keys()
    for name, theirs in names.items():
        assert not np.array_equal(trained[name], base[name])
        np.testing.assert_array_equal(tensors[f"base_model.model.{theirs}"], trained[name], err_msg=name)


@shows("loftq", "qwen3", trainer="pynative")
@shows("nf4", "qwen3", trainer="pynative")
def test_loftqs_adapter_is_trained_on_its_base(folder, messages):
    assert messages["loftq"] is messages["in_float"] is None
    first, expected = (pynative_runs.losses(folder / run)[0] for run in ("loftq", "in_float"))
    assert first == pytest.approx(expected, rel=1e-6)


def test_adapters_on_experts_are_not_left_out_silently(messages):
    assert messages["experts"] is None
    assert "holds A and B for decoder.layers.1.mlp.experts, which target_modules" in messages["without_experts"]


@saves_the_adapter_alone
def test_the_adapter_of_a_base_in_4_bits_is_saved_alone_and_resumed(folder, messages):
    assert messages["alone"] is messages["alone_resumed"] is None
    assert is_the_rest(folder, "alone")
    saved = load_file(folder / "alone_saved" / f"iteration_{STEPS:08d}" / BASE_FILE)
    assert saved and all("lora" in name for name in saved)
