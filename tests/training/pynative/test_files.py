"""MindFormers' PyNative Trainer is the judge of the files that mindlora reads from it and writes for it."""

import json
import os
import shutil

import numpy as np
import pytest

from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.formats.step_folder import StepFolder
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from tests.support import pynative_runs
from tests.support.pynative_runs import only_with_pynative_trainer
from tests.support.step_folders import MANIFEST, ONE_RANK

pytestmark = only_with_pynative_trainer

LORA = {"target_modules": r"linear_qkv$|linear_proj$|linear_fc1$|mlp\.experts$", "lora_rank": 4, "lora_alpha": 6}
HEADS = Heads(4, 4, 8, q_rank=8)


def stored(path):
    with TensorFile(str(path)) as file:
        return {key: file.read(key) for key in file.tensors}


def loads_adapters_onto_a_base():
    """Whether the installed MindFormers does: from 2.1 on."""
    return pynative_runs.trainer_version() >= (2, 1)


class Files:
    """What one run saved, and what mindlora made of it."""

    def __init__(self, folder):
        self.folder = folder
        self.data = folder / "rows.mindrecord"
        pynative_runs.write_data(self.data, rows=4)
        saved = self.run("trained", 2, {}, LORA, 0.01, callbacks=[{"type": "FillWeights"}])
        self.step = str(folder / "trained_saved")
        assert sorted(saved) and os.path.isfile(os.path.join(self.step, "latest_checkpointed_iteration.txt"))
        self.saved = saved

    def run(self, name, steps, checkpoint, lora, rate, **changes):
        """Trains, and returns what the Trainer saved at the end."""
        checkpoint = {
            "enable_save": True,
            "save_path": str(self.folder / f"{name}_saved"),
            "save_interleaved_steps": 100,
            **checkpoint,
        }
        rates = {"type": "ConstantWarmUpLR", "learning_rate": rate, "warmup_steps": 0}
        nodes = {"checkpoint": checkpoint, "lora_config": lora, "lr_scheduler": rates, **changes}
        config = pynative_runs.tiny_config("deepseek_v3", self.data, steps, **nodes)
        run = pynative_runs.launch(config, self.folder / name)
        assert run.returncode == 0, run.stderr[-3000:]
        return stored(self.folder / f"{name}_saved" / f"iteration_{steps:08d}" / ONE_RANK)

    def loss(self, name):
        """Returns the loss of the first step of a run."""
        return pynative_runs.losses(self.folder / name)[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("pynative_files"))


@pytest.fixture(scope="module")
def base(files):
    """The run's base, through Hugging Face's names and back."""
    convert_base(files.step, str(files.folder / "hf"), None, "hf")
    convert_base(str(files.folder / "hf"), str(files.folder / "base"), None, "pynative")
    return files.folder / "base"


@pytest.fixture(scope="module")
def adapter(files):
    """The run's adapter, through PEFT's form and back."""
    sizes = {"heads": HEADS, "architecture": "deepseek_v3"}
    convert_adapter(files.step, str(files.folder / "peft"), "peft", lora_alpha=6, **sizes)
    convert_adapter(str(files.folder / "peft"), str(files.folder / "adapter"), "pynative", **sizes)
    return files.folder / "adapter"


def test_base_and_adapter_go_to_hugging_face_and_back_bit_for_bit(files, base, adapter):
    again = stored(base / ONE_RANK) | stored(adapter / ONE_RANK)
    # It counts tokens while it trains.
    assert files.saved.keys() - again.keys() == {"decoder.layers.1.mlp.tokens_per_expert"}
    for key, array in again.items():
        assert array.shape == files.saved[key].shape and array.tobytes() == files.saved[key].tobytes(), key
    experts = [key for key in again if key.endswith("weight1_lora_a")]
    assert bool(experts) == loads_adapters_onto_a_base()


def test_the_trainer_loads_what_was_written_and_the_merged_base_has_the_same_loss(files, base, adapter):
    settings = json.loads((adapter / MANIFEST).read_text())["lora_config"]
    written = stored(base / ONE_RANK) | stored(adapter / ONE_RANK)
    load = {"load_path": str(adapter), "base_load_path": str(base), "no_load_optim": True}
    if not loads_adapters_onto_a_base():
        both = shutil.copytree(base, files.folder / "both")
        shutil.copy(adapter / ONE_RANK, both / "adapter.safetensors")
        load = {"load_path": str(both), "no_load_optim": True}
    loaded = files.run("loaded", 1, load, settings, 0.0)
    for key, array in written.items():
        assert loaded[key].tobytes() == array.tobytes(), key
    assert {key for key in loaded if "lora" in key} == {key for key in written if "lora" in key}

    merge_checkpoint(str(base), str(adapter), str(files.folder / "merged"))
    files.run("merged_run", 1, {"load_path": str(files.folder / "merged"), "no_load_optim": True}, settings, 0.0)
    files.run("base_run", 1, {"load_path": str(base), "no_load_optim": True}, settings, 0.0)
    assert files.loss("merged_run") == pytest.approx(files.loss("loaded"), rel=1e-5)
    assert abs(files.loss("base_run") - files.loss("loaded")) > 1e-3


def test_a_run_of_2_1_that_saves_the_adapter_alone_states_its_alpha(files, base):
    if not loads_adapters_onto_a_base():
        pytest.skip("MindFormers 2.0 saves the base with the adapter, and no manifest.")
    alone = {"base_load_path": str(base), "save_trainable_only": True}
    saved = files.run("alone", 1, alone, LORA, 0.01)
    found = adapter_files.read(str(files.folder / "alone_saved"))
    assert set(found.alphas.values()) == {6.0} and found.base_model == str(base)
    assert all("lora" in key for key in saved) and len(found.tensors) == len(saved)
    path = "model.layers.1.mlp.experts.weight2"
    np.testing.assert_array_equal(
        found.tensors[path, "A"].swapaxes(1, 2), saved["decoder.layers.1.mlp.experts.weight2_lora_a"]
    )
    # It was saved with its base elsewhere, whose names it lacks: the base tells which model it is.
    merge_checkpoint(str(base), str(files.folder / "alone_saved"), str(files.folder / "alone_merged"))


def test_eight_ranks_as_mindformers_divides_them_are_joined(tmp_path):
    folder = tmp_path / "ranks"
    run = pynative_runs.python(["-m", "tests.support.pynative_ranks", folder], tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    with np.load(f"{folder}.npz") as whole, StepFolder(str(folder)) as step:
        assert set(step.tensors) == set(whole)
        for key in whole:
            np.testing.assert_array_equal(step.read(key), whole[key], err_msg=key)
    assert len(adapter_files.read(str(folder)).paths) == 4
