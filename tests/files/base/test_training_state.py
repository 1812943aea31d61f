"""Checkpoints that MindFormers' CheckpointMonitor wrote: the optimizer's state beside the model's tensors."""

import numpy as np
import pytest

from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from tests.support.llama_checkpoints import assert_same, llama, load, save_base

# Names of MindFormers' optimizers: AdamW's moments, and those of others.
PREFIXES = ("adam_m", "adam_v", "moments", "accu_grads")
SCALARS = {name: np.ones(1, np.float32) for name in ("global_step", "epoch_num", "loss_scale")}


@pytest.fixture
def checkpoints(tmp_path):
    """A base without, and the same with, what training adds to it."""
    convert_base(save_base(tmp_path / "hf", llama()), str(tmp_path / "clean.safetensors"), "hf", "mindformers")
    clean = load(str(tmp_path / "clean.safetensors"))
    moments = {f"{prefix}.{name}": np.ones_like(array) for prefix in PREFIXES for name, array in clean.items()}
    write_arrays(str(tmp_path / "trained.safetensors"), {**clean, **moments, **SCALARS})
    return str(tmp_path / "clean.safetensors"), str(tmp_path / "trained.safetensors"), len(moments) + len(SCALARS)


def test_they_are_not_converted_and_the_report_says_so(checkpoints, tmp_path):
    clean, trained, extra = checkpoints
    convert_base(clean, str(tmp_path / "first"), None, "hf")
    report = convert_base(trained, str(tmp_path / "second"), None, "hf")
    assert_same(load(str(tmp_path / "second")), load(str(tmp_path / "first")))
    assert f"Left out, as training's and not the model's: {extra} tensors: " in str(report)


def test_they_are_not_merged_along(checkpoints, tmp_path):
    clean, trained, extra = checkpoints
    path = "model.layers.0.attention.wq"
    rows, columns = load(clean)[f"{path}.weight"].shape
    pair = {(path, "A"): np.ones((2, columns), np.float32), (path, "B"): np.ones((rows, 2), np.float32)}
    adapter_files.write(Adapter(pair, {path: 4.0}), str(tmp_path / "adapter"), "peft")
    merge_checkpoint(clean, str(tmp_path / "adapter"), str(tmp_path / "first.safetensors"))
    report = merge_checkpoint(trained, str(tmp_path / "adapter"), str(tmp_path / "second.safetensors"))
    assert_same(load(str(tmp_path / "second.safetensors")), load(str(tmp_path / "first.safetensors")))
    assert report.unchanged == len(load(clean)) - 1
    assert f"Left out, as training's and not the model's: {extra} tensors: " in str(report)
