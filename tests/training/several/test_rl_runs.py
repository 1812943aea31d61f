"""Several adapters that learn from rewards in one run: each learns what it learns alone."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.training.report.history import read_history
from tests.support import rl_runs, tiny_runs
from tests.support.rl_runs import start
from tests.support.what_runs import shows

STEPS = 6
ADAPTERS = {
    "first": {"seed": 1, "rl": {"seed": 1}},
    "second": {"seed": 2, "learning_rate": 2.0e-2, "lora_rank": 3, "rl": {"seed": 2, "num_generations": 5}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokenizer, prompts and rewards."""
    folder = tmp_path_factory.mktemp("rl")
    rl_runs.write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def both(library, folder):
    """The output folder of a run with both adapters."""
    result, output = start(folder, "both", pet={"adapters": nodes(ADAPTERS)}, beta=0.0)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output


def nodes(adapters):
    return [{"name": name, **own} for name, own in adapters.items()]


def alone(folder, name, **keys):
    """The output folder of a run with one of the adapters alone."""
    own = dict(ADAPTERS[name])
    rl, rate = own.pop("rl"), own.pop("learning_rate", None)
    result, output = start(folder, f"{name}_alone", pet=own, rate=rate, **{"beta": 0.0, **rl, **keys})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output


@shows("several", "qwen3")
@pytest.mark.parametrize("name", list(ADAPTERS))
def test_an_adapter_learns_what_it_learns_alone(folder, both, name):
    expected, found = alone(folder, name), both / name
    histories = [read_history(str(output)) for output in (found, expected)]
    for series in ("reward", "reward_std", "held_out_reward", "completions/mean_length"):
        values = [history.series(series)[1].tolist() for history in histories]
        assert values[0] == values[1] and len(values[1]) == (STEPS // 2 if "held_out" in series else STEPS), series
    differences = histories[0].series("agreement/max")[1]
    assert len(differences) == STEPS and 0 < differences.max() < 1e-4
    same_weights(found, expected)


def same_weights(found, expected):
    for step in range(2, STEPS + 1, 2):
        states = [
            load_file(output / "lora_checkpoint" / f"step_{step}" / "adapter_model.safetensors")
            for output in (found, expected)
        ]
        assert states[0].keys() == states[1].keys() and states[0]
        for key, array in states[1].items():
            np.testing.assert_allclose(states[0][key], array, rtol=0, atol=1e-5, err_msg=f"step {step}: {key}")
