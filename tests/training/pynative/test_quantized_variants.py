"""DoRA, MiSS, VeRA and AdaLoRA under MindFormers' PyNative Trainer on a Qwen3 whose linear cells are in 4 bits."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.files.adapters import files as adapter_files
from tests.support import pynative_runs
from tests.support.pynative_runs import BASE_FILE, LORA, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS = 4
VARIANTS = {
    "dora": {"use_dora": True},
    "miss": {"use_miss": True},
    "vera": {"use_vera": True, "d_initial": 1.0},
    "adalora": {"use_adalora": True, "init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "deltaT": 1},
}
# Their files can hold VeRA's vectors.
NOT_JOINED = {**LORA, "target_modules": r"linear_(proj|fc2)$"}
# A large epsilon, or AdamW would make a whole step of the last bits of a gradient that is almost zero.
OPTIMIZER = {"type": "AdamW", "weight_decay": 0.0, "eps": 0.01}


def is_quantized(name):
    return ".linear_" in name and "lora" not in name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of each variant from a base in 4 bits and from what that decodes to, and one resumed."""
    folder = tmp_path_factory.mktemp("quantized")
    data = folder / "rows.mindrecord"
    pynative_runs.write_data(data, rows=16)
    pynative_runs.write_base(folder / "base", folder / "hf")
    shutil.copytree(folder / "base", folder / "decoded")
    tensors = load_file(folder / "base" / BASE_FILE)
    for name in filter(is_quantized, list(tensors)):
        tensors[name] = dequantize(quantize(tensors[name]))
    save_file(tensors, folder / "decoded" / BASE_FILE)

    def config(name, load, **pet_config):
        saved = {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 2}
        adapters = {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(folder / f"{name}_peft")}
        nodes = {"callbacks": [adapters, {"type": "RecordLosses", "directory": str(folder / name)}]}
        nodes["lora_config"] = NOT_JOINED if "use_vera" in pet_config else LORA
        nodes |= {"checkpoint": {**saved, **load}, "optimizer": OPTIMIZER, "pet_config": pet_config}
        return pynative_runs.tiny_config("qwen3", data, STEPS, **nodes)

    configs = []
    for name, fields in VARIANTS.items():
        for base in ("base", "decoded"):
            form = {"quantize_base": "nf4"} if base == "base" else {}
            load = {"load_path": str(folder / base), "no_load_optim": True}
            # Of a base in 4 bits no values are drawn, and the adapter's would be others without a seed of their own.
            configs.append(config(f"{name}_{base}", load, seed=3, **fields, **form))
    half = {"load_path": str(folder / "dora_base_saved" / "iteration_00000002")}
    configs.append(config("dora_resumed", half, seed=3, **VARIANTS["dora"], quantize_base="nf4"))
    assert pynative_runs.series(configs, folder) == [None] * len(configs)
    return folder


@pytest.mark.parametrize("name", VARIANTS)
@shows("nf4_variants", "qwen3", trainer="pynative")
def test_it_trains_as_on_what_the_base_decodes_to(runs, name):
    packed, decoded = (pynative_runs.losses(runs / f"{name}_{base}") for base in ("base", "decoded"))
    # MindFormers 2.0 rounds the logits.
    rtol = 1e-4 if pynative_runs.trainer_version() == (2, 0) else 1e-5
    np.testing.assert_allclose(packed, decoded, rtol=rtol)
    assert packed[-1] != packed[0]
    packed, decoded = (pynative_runs.trained(runs / f"{name}_{base}") for base in ("base", "decoded"))
    assert packed.keys() == decoded.keys() and packed
    for part, values in decoded.items():
        np.testing.assert_allclose(packed[part], values, atol=10 * rtol, err_msg=part)


def test_the_folder_for_peft_says_nf4_and_a_resumed_run_is_the_rest_of_the_whole_one(runs):
    adapter = adapter_files.read(str(runs / "dora_base_peft" / f"step_{STEPS}"))
    assert adapter.fingerprint["quantization"] == "nf4" and adapter.variant.name == "DoRA"
    whole, resumed = (pynative_runs.losses(runs / f"dora_{name}") for name in ("base", "resumed"))
    assert resumed == whole[2:] and len(whole) == STEPS
    whole, resumed = (pynative_runs.trained(runs / f"dora_{name}") for name in ("base", "resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)
