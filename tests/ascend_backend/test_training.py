"""Training runs that MindSpore's Ascend backend compiles and plans, on stand-ins for CANN."""

import os

from tests.conftest import ROOT
from tests.support.ascend_backend import SMALL_LLAMA, run_yaml, write_rows

LLAMA = os.path.join(ROOT, "configs/llama3/lora_llama3_8b.yaml")


def test_the_llama_yaml_trains_to_its_end_on_one_device(tmp_path):
    data = write_rows(tmp_path / "rows.mindrecord", rows=8, tokens=2049)
    flags = ("--train_dataset_dir", data, "--runner_config.epochs", "1", *SMALL_LLAMA)
    run = run_yaml(LLAMA, *flags, folder=tmp_path)
    assert run.returncode == 0, run.output[-3000:]
    assert "step:[    2/    2]" in run.output
    assert "step_2" in os.listdir(tmp_path / "out/lora_checkpoint")
    assert run.peak_bytes > 2**30 and run.on_cpu == ()
