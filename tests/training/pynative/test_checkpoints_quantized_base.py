"""quantize_base under MindFormers' PyNative Trainer: a DeepSeek-V3 whose linear cells and experts are in 4 bits."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.files.adapters import files as adapter_files
from tests.support import pynative_runs
from tests.support.pynative_runs import BASE_FILE, LORA_WITH_EXPERTS, only_with_pynative_trainer
from tests.support.what_runs import shows

pytestmark = only_with_pynative_trainer
STEPS = 4
NF4 = {"quantize_base": "nf4"}
# A large epsilon, or AdamW would make a whole step of the last bits of a gradient that is almost zero.
OPTIMIZER = {"type": "AdamW", "weight_decay": 0.0, "eps": 0.01}


def is_quantized(name):
    return ("linear_" in name or name.endswith(("experts.weight1", "experts.weight2"))) and "lora" not in name


def matrix(array):
    return array.reshape(-1, array.shape[-1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with runs from a base in 4 bits, one of them resumed, and from it dequantized; the last refusal.

    The bases have A and B too.
    """
    folder = tmp_path_factory.mktemp("quantized")
    data = folder / "rows.mindrecord"
    pynative_runs.write_data(data, rows=16)

    def config(steps, checkpoint, name, *callbacks, pet_config=None):
        recorded = {"type": "RecordLosses", "directory": str(folder / name)}
        nodes = {"callbacks": [*callbacks, recorded], "checkpoint": checkpoint, "lora_config": LORA_WITH_EXPERTS}
        nodes |= {"optimizer": OPTIMIZER, "pet_config": pet_config}
        return pynative_runs.tiny_config("deepseek_v3", data, steps, **nodes)

    def saved(name):
        return {"enable_save": True, "save_path": str(folder / f"{name}_saved"), "save_interleaved_steps": 2}

    assert pynative_runs.series([config(1, saved("seed"), "seed", {"type": "FillWeights"})], folder) == [None]
    base = folder / "seed_saved" / "iteration_00000001"
    tensors = load_file(base / BASE_FILE)
    shutil.copytree(base, folder / "dequantized")
    for name in filter(is_quantized, list(tensors)):
        tensors[name] = dequantize(quantize(matrix(tensors[name]))).reshape(tensors[name].shape)
    save_file(tensors, folder / "dequantized" / BASE_FILE)

    load = {"load_path": str(base), "no_load_optim": True}
    resume = {"enable_save": False, "load_path": str(folder / "whole_saved" / "iteration_00000002")}
    adapters = {"type": "LoraCheckpoint", "save_steps": STEPS, "directory": str(folder / "adapters")}
    configs = [
        config(STEPS, {**saved("whole"), **load}, "whole", adapters, pet_config=NF4),
        config(STEPS, resume, "resumed", pet_config=NF4),
        config(STEPS, {"enable_save": False, **load, "load_path": str(folder / "dequantized")}, "float"),
        config(1, resume, "float_resumed"),
    ]
    messages = pynative_runs.series(configs, folder)
    assert messages[:3] == [None] * 3
    return folder, messages[3]


@shows("nf4", "deepseek_v3", trainer="pynative")
def test_it_trains_as_on_the_dequantized_base(runs):
    folder, _ = runs
    losses, expected = (pynative_runs.losses(folder / name) for name in ("whole", "float"))
    # MindFormers 2.0 rounds the logits.
    rtol = 1e-4 if pynative_runs.trainer_version() == (2, 0) else 1e-5
    np.testing.assert_allclose(losses, expected, rtol=rtol)
    trained, expected = (pynative_runs.trained(folder / name) for name in ("whole", "float"))
    assert trained.keys() == expected.keys() and any("experts.weight1_lora_b" in name for name in trained)
    for name, values in expected.items():
        np.testing.assert_allclose(trained[name], values, atol=10 * rtol, err_msg=name)


def test_the_checkpoint_holds_the_codes_and_a_resumed_run_is_the_rest_of_the_whole_one(runs):
    folder, _ = runs
    before = load_file(folder / "seed_saved" / "iteration_00000001" / BASE_FILE)
    after = load_file(folder / "whole_saved" / f"iteration_{STEPS:08d}" / BASE_FILE)
    quantized = [name for name in before if is_quantized(name)]
    assert len(quantized) == 14
    for name in quantized:
        np.testing.assert_array_equal(after[name], quantize(matrix(before[name])).codes, err_msg=name)
    whole, resumed = (pynative_runs.losses(folder / name) for name in ("whole", "resumed"))
    assert resumed == whole[2:] and len(whole) == STEPS
    whole, resumed = (pynative_runs.trained(folder / name) for name in ("whole", "resumed"))
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


def test_the_folder_for_peft_has_what_was_trained_and_says_nf4(runs):
    folder, _ = runs
    adapter = adapter_files.read(str(folder / "adapters" / f"step_{STEPS}"))
    assert adapter.fingerprint["quantization"] == "nf4"
    trained = pynative_runs.trained(folder / "whole")
    b = adapter.tensors["model.layers.1.mlp.experts.weight2", "B"]
    np.testing.assert_array_equal(b.swapaxes(1, 2), trained["decoder.layers.1.mlp.experts.weight2_lora_b"])


def test_a_checkpoint_in_4_bits_is_refused_where_the_model_is_in_float(runs):
    _, message = runs
    assert "in 4 bits, but the model has them in float. Set pet_config.quantize_base" in message
