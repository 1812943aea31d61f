"""save_lora killed at any time leaves one complete adapter."""

import os
import shutil
import subprocess
import sys

import pytest

from mindlora import load_lora, save_lora
from tests.support import killed_saves
from tests.support.networks import as_array, snapshot
from tests.support.saved_adapters import network


@pytest.mark.parametrize("form", ["peft", "ckpt", "fallback"])
def test_after_each_of_fifty_kills_there_is_one_complete_adapter(tmp_path, form):
    run = subprocess.run(
        [sys.executable, killed_saves.__file__, str(tmp_path), form, "50"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    half_written = int(run.stdout.splitlines()[-1])
    print(f"{half_written} of 50 kills left half an adapter beside the complete one")
    assert half_written > 5  # otherwise the kills came at the wrong time, and nothing was tested
    # What they leave behind does not disturb the next reader or the next writer.
    path = str(tmp_path / ("adapter.ckpt" if form == "ckpt" else "adapter"))
    target = killed_saves.network(1)
    target[0].mindpet_delta_lora_a.set_data(target[0].mindpet_delta_lora_a * 0)
    save_lora(killed_saves.network(1), path, "ckpt" if form == "ckpt" else "peft")
    load_lora(target, path, on_base_mismatch="ignore")
    assert killed_saves.read(path, form) == {1.0} and as_array(target[0].mindpet_delta_lora_a).all()


def test_the_old_adapter_is_loaded_after_a_kill_between_two_renames(tmp_path, saved):
    shutil.move(saved, tmp_path / ".adapter.replaced")
    target = network()
    load_lora(target, saved)
    assert snapshot(target) == snapshot(network(seed=2)) and os.listdir(tmp_path) == ["adapter"]
