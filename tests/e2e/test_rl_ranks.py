"""Two processes that learn from rewards together: as one process on all prompts, to the same bits when resumed."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.training.report.history import read_history
from tests.support import rl_runs, tiny_runs
from tests.support.ranks import run_ranks
from tests.support.runs import write_yaml
from tests.support.what_runs import shows

STEPS = 8
START = "import sys; from mindlora.training.launch import launcher; sys.exit(launcher.main(sys.argv[1:]))"
# Each process rates its own part of the answers, of four steps and of held-out prompts; then one of the two raises.
REWARDS = """
import os
calls = 0

def ends(prompts, completions, **columns):
    global calls
    calls += 1
    if calls > 8 and os.environ["RANK_ID"] == "1":
        raise ValueError("nothing to see")
    return [text.count("e") / max(len(text), 1) for text in completions]
"""
# Adam divides by the size of the gradient, which would hide a gradient twice as large; with a large eps it does not.
KEYS = {
    "rate": 20.0,
    "changes": {"optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1.0, "weight_decay": 0.0}},
    # With the graphs of one process of training/rl/test_runs.py.
    "model": {"params_dtype": "bfloat16"},
    # What is compared over the answers of all processes.
    "scale_rewards": "batch",
    "num_iterations": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokenizer, prompts and rewards."""
    folder = tmp_path_factory.mktemp("rl_ranks")
    rl_runs.write_inputs(folder)
    (folder / "ending.py").write_text(REWARDS, encoding="utf-8")
    # Not a multiple of two, of which one is answered twice.
    rows = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "held_out.jsonl").write_text("".join(rows[:3]), encoding="utf-8")
    return folder


def two_ranks(folder, name, resume=False, code=0):
    """Runs it in two processes, longer than STEPS; returns its output folder and the logs."""
    rl = {"held_out_prompts": "held_out.jsonl", "reward_funcs": "ending.py:ends"}
    config = rl_runs.config_of(resume, epochs=3, **KEYS, **rl)
    config.update(use_parallel=True, parallel_config={"data_parallel": 2})
    config.setdefault("parallel", {})["parallel_mode"] = 0
    output = folder / name
    output.mkdir()
    (output / "start.py").write_text(START, encoding="utf-8")
    arguments = "--config", write_yaml(output, config), "--output_dir", output / "run"
    for file in ("model", "ending.py", "prompts.jsonl", "held_out.jsonl"):
        (output / file).symlink_to(folder / file)
    return output / "run", run_ranks(2, output, output / "start.py", *arguments, code=code)


@pytest.fixture(scope="module")
def two(library, folder):
    """The output folder of two processes, one of which fails in the end, and their logs."""
    return two_ranks(folder, "two", code=1)


@pytest.fixture(scope="module")
def one(library, folder):
    """The output folder of one process with the prompts of both."""
    result, output = rl_runs.start(folder, "one", epochs=2, held_out_prompts="held_out.jsonl", **KEYS)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output


@shows("rl", "qwen3", place="processes")
def test_two_processes_learn_what_one_learns_from_the_prompts_of_both(two, one):
    two, _ = two
    state = "adapter_model.safetensors"
    ours, theirs = (load_file(run / "lora_checkpoint" / f"step_{STEPS}" / state) for run in (two, one))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-5 * np.abs(array).max(), err_msg=name)
    assert any(np.abs(array).max() > 1e-3 for name, array in theirs.items() if "lora_B" in name)
    histories = [read_history(str(run)) for run in (two, one)]
    for name in ("reward", "reward_std", "kl", "completions/mean_length", "clip_ratio/region_mean", "held_out_reward"):
        (steps, found), (expected_steps, expected) = (history.series(name) for history in histories)
        assert steps.tolist() == expected_steps.tolist() and len(steps) == (4 if name == "held_out_reward" else STEPS)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=name)
    assert 0 < max(histories[0].series("agreement/max")[1]) < 1e-4


def test_a_reward_that_fails_on_one_rank_ends_all_with_an_error_that_names_it(two):
    for log in two[1]:
        lines = [line for line in log.splitlines() if line.startswith("mindlora-run: error:")]
        assert len(lines) == 1 and "rank 1: rl.reward_funcs: ends: it raised ValueError" in lines[0], lines


def test_a_resumed_run_learns_the_same_bits(folder, two):
    resumed, _ = two_ranks(folder, "resumed", str(two[0] / "lora_checkpoint" / "step_4"))
    tiny_runs.assert_same_state(*(run / "lora_checkpoint" / f"step_{STEPS}" for run in (two[0], resumed)))
