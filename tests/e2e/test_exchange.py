"""gradient_exchange in a YAML: two processes train a Qwen3 with quantized, and resume it."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.mcore_networks import tiny_config
from tests.support.ranks import run_ranks
from tests.support.runs import write_rows, write_yaml
from tests.support.what_runs import shows

STEPS, SAVED = 8, 4
EXCHANGE = {"type": "quantized", "check_every": 3}
# Runs mindlora-run twice in one process, which is mostly imports, and compiles the first run alone.
TWICE = """
import json, sys
from mindlora.training.launch import launcher
from tests.support import mcore_pynative_run
whole, resumed = json.loads(sys.argv[1])
codes = [launcher.main(whole), mcore_pynative_run.main(resumed)]
print("ended with", codes)
sys.exit(any(codes))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of 8 steps, and one that resumes it from step 4."""
    folder = tmp_path_factory.mktemp("exchange")
    write_rows(folder / "data.mindrecord", rows=2 * 4 * STEPS, step=5)
    saved = folder / "whole" / "lora_checkpoint"
    arguments = [launch(folder, "whole"), launch(folder, "resumed", resume=str(saved / f"step_{SAVED}"))]
    (folder / "twice.py").write_text(TWICE)
    logs = run_ranks(2, folder, folder / "twice.py", json.dumps(arguments))
    return folder, logs


def launch(folder, name, **checkpoint):
    """Writes the YAML of a run, and returns the arguments for mindlora-run."""
    pet = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["linear_qkv", "linear_fc2"]}
    callbacks = [{"type": "LoraCheckpoint", "save_steps": SAVED, **checkpoint}]
    parallel = {"use_parallel": True, "parallel_config": {"data_parallel": 2}}
    config = tiny_config(str(folder / "data.mindrecord"), 1, callbacks, pet, **parallel)
    config["runner_wrapper"]["gradient_exchange"] = EXCHANGE
    (folder / name).mkdir()
    return ["--config", write_yaml(folder / name, config), "--output_dir", str(folder / name)]


def unsent(folder, rank):
    path = folder / "lora_checkpoint" / "unsent_gradients" / f"step_{STEPS}.rank_{rank}.safetensors"
    return load_file(path)["unsent"]


@shows("exchange", "qwen3", place="processes")
@shows("lora", "qwen3", place="processes")
def test_a_resumed_run_ends_with_the_same_bits(runs):
    folder, logs = runs
    for name in ("adapter_model.safetensors", "training_state.safetensors"):
        paths = [folder / run / "lora_checkpoint" / f"step_{STEPS}" / name for run in ("whole", "resumed")]
        one, two = map(load_file, paths)
        assert one.keys() == two.keys()
        assert all((one[key] == two[key]).all() for key in one)
    for rank in range(2):
        values = unsent(folder / "whole", rank)
        assert np.abs(values).max() > 0
        assert values.tobytes() == unsent(folder / "resumed", rank).tobytes()
        assert "were not sent start at zero" not in logs[rank]
    assert (unsent(folder / "whole", 0) != unsent(folder / "whole", 1)).any()


def test_every_step_is_recorded_with_its_bytes(runs):
    folder, logs = runs
    records = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    counts = [record["bytes_exchanged"] for record in records if "bytes_exchanged" in record]
    assert len(counts) == STEPS
    assert len(set(counts)) == 1
    assert f"sends {counts[0]:,} bytes per step" in logs[0]


def test_ranks_are_compared_in_data_parallel_alone(mindformers):
    assert [dict(callback) for callback in prepared(use_parallel=True, parallel={"parallel_mode": 0})] == [
        {"type": "ExchangeCheck", "check_every": 3}
    ]
    assert prepared(use_parallel=False) == []
    never = {"type": "LoraTrainOneStepCell", "gradient_exchange": {"type": "dense", "check_every": 0}}
    assert prepared(use_parallel=True, runner_wrapper=never) == []


def prepared(**changes):
    """Returns the callbacks of a YAML after prepare_exchange."""
    from mindformers.tools.register import MindFormerConfig

    from mindlora.training.exchange.exchange_check import prepare_exchange

    wrapper = {"type": "LoraTrainOneStepCell", "gradient_exchange": EXCHANGE}
    config = MindFormerConfig(**{"runner_wrapper": wrapper, "callbacks": [], **changes})
    prepare_exchange(config)
    return config.callbacks
