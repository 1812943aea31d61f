"""mindlora-run loads a base in safetensors itself: the weights that MindFormers loads, but none is left random."""

import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora.files.base.convert import convert_base
from mindlora.training.report.history import FILE_NAME
from tests.support import tiny_runs
from tests.support.llama_checkpoints import CONFIG, llama, save_base

# The format that the YAML gives for each form of the base.
FORMS = {"base.ckpt": "ckpt", "base.safetensors": "safetensors", "hf": "safetensors"}


@pytest.fixture(scope="module")
def base(mindformers, tmp_path_factory):
    """A folder with one base in several forms, of which MindFormers loads base.ckpt; and data."""
    folder = tmp_path_factory.mktemp("base_loading")
    tensors = {name: np.float32(0.2) * array for name, array in llama(np.dtype("<f4")).items()}
    save_base(folder / "hf", tensors, **CONFIG)
    for name in ("base.ckpt", "base.safetensors"):
        convert_base(str(folder / "hf"), str(folder / name), "hf", "mindformers")
    tiny_runs.write_data(folder / "train.mindrecord", tiny_runs.BATCH_SIZE)
    return folder


def configuration(folder, path, format_):
    """The YAML of a run of one step on a base, in PyNative, which compiles no graph for it."""
    config = tiny_runs.tiny_config(folder / "train.mindrecord", 1, [])
    config["context"]["mode"] = 1
    config["model"]["model_config"]["num_layers"] = 2
    return {**config, "load_checkpoint": str(folder / path), "load_ckpt_format": format_}


def test_the_first_loss_is_that_of_mindformers_loading(base):
    losses = {}
    for path, format_ in FORMS.items():
        output = base / f"output_{path}"
        process = tiny_runs.launch(configuration(base, path, format_), output)
        assert process.returncode == 0, process.stderr[-3000:]
        # B is zero: what A was drawn as does not matter yet.
        losses[path] = tiny_runs.losses(output)[1]
    assert losses["base.safetensors"] == losses["hf"] == losses["base.ckpt"]


def test_a_norm_that_the_checkpoint_lacks_ends_the_run_before_its_first_step(base):
    tensors = load_file(base / "base.safetensors")
    del tensors["model.layers.1.ffn_norm.weight"]
    save_file(tensors, base / "lacking.safetensors")
    process = tiny_runs.launch(configuration(base, "lacking.safetensors", "safetensors"), base / "output_lacking")
    assert process.returncode == 1
    assert "lacking.safetensors lacks model.layers.1.ffn_norm.weight, which would stay random" in process.stderr
    assert not os.path.exists(base / "output_lacking" / FILE_NAME)


def test_what_mindformers_must_load_is_left_to_it(base):
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.launch.preflight import take_base_over

    adapted = load_file(base / "base.safetensors")
    adapted["model.layers.0.attention.wq.mindpet_delta_lora_a"] = np.ones((2, 2), np.float32)
    save_file(adapted, base / "adapted.safetensors")
    for path, changes in (
        ("base.ckpt", {}),
        ("adapted.safetensors", {}),
        ("base.safetensors", {"use_parallel": True, "parallel": {"parallel_mode": 1}}),
        ("base.safetensors", {"run_mode": "eval"}),
    ):
        config = MindFormerConfig(**{**configuration(base, path, FORMS.get(path, "safetensors")), **changes})
        take_base_over(config)
        assert config.load_checkpoint == str(base / path), path
    for changes in ({}, {"use_parallel": True, "parallel": {"parallel_mode": 0}, "auto_trans_ckpt": True}):
        config = MindFormerConfig(**{**configuration(base, "hf", "safetensors"), **changes})
        take_base_over(config)
        assert config.load_checkpoint == "" and config.callbacks[0].type == "BaseWeights"
        assert not config.auto_trans_ckpt
