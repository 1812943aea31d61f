"""mindlora-run with guards: faults end near the clean run's loss, and a stopped run goes on as if it never had."""

import re
import types

import pytest

from mindlora.training.report.history import read_history
from tests.support import tiny_runs
from tests.support.runs import SIZES, write_rows
from tests.support.what_runs import shows

ROWS, EPOCHS = 48, 6
STEPS = ROWS // tiny_runs.BATCH_SIZE * EPOCHS
NAN = float("nan")

# Ctrl-C in step 20. While a graph runs, MindSpore's handler is in the place of Python's, and does what this one does.
STOPPED = """
import os, signal, sys, time
from mindlora.training.callbacks.registry import GracefulStop, LoraCheckpoint
from mindlora.training.launch.launcher import main
def stop(self, run_context):
    params = run_context.original_args()
    if params.cur_step_num == 20:
        (graceful,) = [callback for callback in params.list_callback if isinstance(callback, GracefulStop)]
        before = signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        os.kill(os.getpid(), signal.SIGINT)
        while graceful.received is None:
            time.sleep(0.01)
        signal.signal(signal.SIGINT, before)
LoraCheckpoint.on_train_step_begin = stop
# In the background of a shell it would be ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""
POISONED = """
import sys
from mindlora.training.launch.launcher import main
from tests.support import poisoned_step
sys.exit(main())
"""


class Runs:
    """Runs of one configuration: a base that counts by threes learns more of the same."""

    def __init__(self, folder, base):
        self.folder, self.base = folder, base
        self.train, self.held_out = folder / "train.mindrecord", folder / "heldout.mindrecord"
        write_rows(self.train, rows=ROWS, seed=5)
        write_rows(self.held_out, rows=16, seed=9)

    def start(self, name, *callbacks, rate=1e-2, script=None, wrapper=None, **checkpoint):
        """Runs it; returns the process, the output folder, the losses and the events of the run."""
        common = [
            {"type": "HeldOutLoss", "dataset_dir": str(self.held_out), "every_steps": 12},
            {"type": "WarmUp", "steps": 24, "start_factor": 0.2},
            {"type": "ReduceOnPlateau", "metric": "loss", "every_steps": 5, "patience": 1, "factor": 0.5},
            {"type": "LoraCheckpoint", "save_steps": 36, "best_metric": "held_out_loss", **checkpoint},
        ]
        config = tiny_runs.tiny_config(self.train, EPOCHS, [*common, *callbacks], load_checkpoint=str(self.base))
        config["model"]["model_config"].update(SIZES)
        config["model"]["model_config"]["pet_config"]["target_modules"] = "all-linear"
        config["lr_schedule"]["learning_rate"] = rate
        config["runner_wrapper"]["type"] = wrapper or "LoraTrainOneStepCell"
        output = self.folder / name
        process = tiny_runs.launch(config, output, script)
        assert (output / "report.html").exists(), process.stdout[-3000:] + process.stderr[-3000:]
        history = read_history(str(output))
        return types.SimpleNamespace(
            process=process,
            output=output,
            held_out=dict(zip(*history.series("held_out_loss"))),
            losses=tiny_runs.losses(output),
            history=history,
        )


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("guarded"), base)


@pytest.fixture(scope="module")
def clean(runs):
    return runs.start("clean")


def events(run, kind):
    return [event["step"] for event in run.history.events if event["event"] == kind]


@shows("guard", "llama")
def test_a_rate_100_times_too_high_ends_near_the_clean_run(runs, clean):
    run = runs.start("too-high", {"type": "TrainingGuard"}, rate=1.0)
    assert run.process.returncode == 0, run.process.stderr[-2000:]
    assert max(run.losses.values()) > 3 * clean.held_out[STEPS]  # It did diverge.
    assert 2 <= len(events(run, "rollback")) <= 5
    assert run.held_out[STEPS] <= 1.02 * clean.held_out[STEPS]


def test_poisoned_batches_end_near_the_clean_run(runs, clean):
    factors = {20: NAN, 30: 50.0, **dict.fromkeys(range(40, 44), NAN)}
    poison = {"type": "Poison", "factors": factors}
    run = runs.start("poisoned", {"type": "TrainingGuard"}, poison, script=POISONED, wrapper="PoisonedStep")
    assert run.process.returncode == 0, run.process.stderr[-2000:]
    assert events(run, "skipped_step") == list(factors) and events(run, "rollback") == [43]
    assert run.held_out[STEPS] <= 1.02 * clean.held_out[STEPS]


def test_a_run_stopped_by_ctrl_c_and_resumed_equals_the_uninterrupted_one(runs, clean):
    stopped = runs.start("stopped", script=STOPPED)
    assert stopped.process.returncode == 130
    folder = stopped.output / "lora_checkpoint" / "step_20"
    assert stopped.process.stderr.strip().splitlines()[-1] == (
        f"mindlora-run: SIGINT stopped the run after step 20 of {STEPS}. It is saved in {folder}. To resume, "
        "repeat the command with --resume, or set resume: True in LoraCheckpoint."
    )
    assert list(stopped.losses) == list(range(1, 21))
    resumed = runs.start("stopped", resume=True)
    assert resumed.process.returncode == 0, resumed.process.stderr[-2000:]
    # The step and the held-out loss, though the rate is another one than at the start.
    assert resumed.process.stdout.count("A compiled graph was taken from") == 2
    assert {**stopped.losses, **resumed.losses} == clean.losses
    for step in (36, STEPS):
        tiny_runs.assert_same_state(*(run.output / f"lora_checkpoint/step_{step}" for run in (clean, resumed)))
    # The rate had been cut before the stop or was cut after it, and each step used the same one.
    rates = [record["learning_rate"] for record in clean.history.steps]
    assert rates == [record["learning_rate"] for record in resumed.history.steps]
    assert len(events(clean, "learning_rate")) > 2


def test_the_step_is_compiled_once_however_often_the_rate_changes(clean):
    times = re.findall(r"per_step_time: (\d+)ms", clean.process.stdout)
    assert len(times) == STEPS
    first, others = int(times[0]), sorted(map(int, times[1:]))
    # The rate changed at each of the first 24 steps.
    assert others[len(others) // 2] * 4 < first and sum(time > first / 2 for time in others) <= 2
