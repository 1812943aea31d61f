"""Steps of which no token counts, where several processes divide the model and mindlora's callbacks do not run."""

import json

import numpy as np
import pytest

from tests.support import pynative_runs
from tests.support.pynative_runs import only_with_pynative_trainer

pytestmark = only_with_pynative_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(the folder, what was printed) of runs of one, two and three steps, of which the second has no labels."""
    folder = tmp_path_factory.mktemp("several")
    data = folder / "half.mindrecord"
    pynative_runs.write_data(data, rows=8, labeled=4)
    configs = []
    for steps in (1, 2, 3):
        recorded = [{"type": "FillWeights"}, {"type": "RecordLosses", "directory": str(folder / str(steps))}]
        configs.append(pynative_runs.tiny_config("qwen3", data, steps, callbacks=recorded))
        configs[-1]["train_dataset"]["dataloader"]["shuffle"] = False
    given, found = folder / "given.json", folder / "found.json"
    given.write_text(json.dumps(configs), encoding="utf-8")
    done = pynative_runs.python(["-m", "tests.support.pynative_several", given, found], folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(found.read_text(encoding="utf-8")) == [None] * 3
    return folder, done.stdout + done.stderr


def test_they_change_nothing_and_the_next_step_trains_again(run):
    first, second, third = (pynative_runs.trained(run[0] / str(steps)) for steps in (1, 2, 3))
    assert all(np.array_equal(second[name], first[name]) for name in first)
    assert not all(np.array_equal(third[name], first[name]) for name in first)
    assert pynative_runs.losses(run[0] / "3")[1] == 0


def test_each_is_said_and_counted(run):
    said = "step 2: No token of the step's rows counts in the loss: it has nothing to learn, and was skipped (1 so far"
    assert run[1].count(said) == 2 and "step 1: No token" not in run[1] and "step 3: No token" not in run[1]
