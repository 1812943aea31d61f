"""Two processes of one run: a signal that one of them gets stops both at the same step, and both decide alike."""

import json
import signal

import numpy as np
import pytest
import yaml

from tests.support import tiny_runs
from tests.support.ranks import run_ranks
from tests.support.runs import write_rows

# Rank 1 gets the signal while step 7 is computed; each rank writes down what it has at the end.
WORKER = """
import json, os, signal, sys
import numpy as np
from mindformers.tools.utils import get_real_rank
from mindlora.training.callbacks.registry import EarlyStopping, LoraCheckpoint
from mindlora.training.launch.launcher import main
def stop(self, run_context):
    if get_real_rank() == 1 and run_context.original_args().cur_step_num == 7:
        os.kill(os.getpid(), signal.SIGTERM)
def write_down(self, run_context):
    params = run_context.original_args()
    found = {p.name: p.asnumpy() for p in params.train_network.trainable_params()}
    np.savez(f"rank_{get_real_rank()}.npz", **found)
    states = {type(c).__name__: c.training_state() for c in params.list_callback if hasattr(c, "training_state")}
    with open(f"rank_{get_real_rank()}.json", "w") as file:
        json.dump({"step": params.cur_step_num, "states": states, "factors": params.train_network.rate_factors}, file)
LoraCheckpoint.on_train_step_begin = stop
EarlyStopping.on_train_end = write_down
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of the run, and what the ranks printed."""
    folder = tmp_path_factory.mktemp("stopped")
    write_rows(folder / "train.mindrecord", rows=64)
    write_rows(folder / "heldout.mindrecord", rows=8, seed=3)
    callbacks = [
        {"type": "HeldOutLoss", "dataset_dir": str(folder / "heldout.mindrecord"), "every_steps": 2},
        {"type": "ReduceOnPlateau", "threshold": 0.5, "patience": 0},
        {"type": "GradientNormRate", "window": 4},
        {"type": "TrainingGuard"},
        {"type": "EarlyStopping", "patience": 99, "min_delta": 1.0},
        {"type": "LoraCheckpoint", "save_steps": 100, "best_metric": "held_out_loss"},
    ]
    config = tiny_runs.tiny_config(folder / "train.mindrecord", 2, callbacks, use_parallel=True)
    config["parallel_config"] = {"data_parallel": 2}
    # PyNative compiles no graph, and how they agree does not depend on one.
    config["context"]["mode"] = 1
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (folder / "worker.py").write_text(WORKER)
    arguments = ("--config", folder / "run.yaml", "--output_dir", folder / "output")
    return folder, run_ranks(2, folder, folder / "worker.py", *arguments, code=128 + signal.SIGTERM)


def test_both_stop_at_the_same_step_with_the_same_adapter(stopped):
    folder, logs = stopped
    first, second = (np.load(folder / f"rank_{rank}.npz") for rank in range(2))
    assert first.files == second.files and any(np.abs(first[name]).max() > 1e-3 for name in first.files)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first.files)
    saved = folder / "output" / "lora_checkpoint" / "step_8"
    metadata = json.loads((saved / "training_state.json").read_text())
    assert metadata["step"] == 8
    for log in logs:
        assert f"mindlora-run: SIGTERM stopped the run after step 8 of 16. It is saved in {saved}." in log


def test_both_have_decided_alike(stopped):
    first, second = (json.loads((stopped[0] / f"rank_{rank}.json").read_text()) for rank in range(2))
    assert first == second and first["step"] == 8
    states = first["states"]
    assert states["EarlyStopping"]["waited"] == 3 and len(states["TrainingGuard"]["guard"]["losses"]) == 8
    # Cut after the second measurement and after each one since: decided by the held-out loss of both.
    assert first["factors"]["ReduceOnPlateau"] == pytest.approx(1e-3)
