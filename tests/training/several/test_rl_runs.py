"""Several adapters that learn from rewards in one run: each learns what it learns alone."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora import save_lora
from mindlora.training.report.history import read_history
from tests.support import rl_runs, tiny_runs
from tests.support.mcore_networks import tiny_qwen3_moe, with_adapters
from tests.support.networks import normal
from tests.support.rl_runs import OF_GKD, start
from tests.support.what_runs import shows

STEPS = 6
# What ends a run with an error, what the calls of a reward are, and an adapter whose held-out reward always rises.
REWARDS = """
def forgets(prompts, completions, **columns):
    return [0.0]

def is_always_one(prompts, completions, **columns):
    with open("calls.txt", "a") as file:
        file.write(f"{len(completions)} ")
    return [1.0] * len(completions)

held_out = 0

def share_of_e(prompts, completions, **columns):
    global held_out
    shares = [text.count("e") / max(len(text), 1) for text in completions]
    if len(completions) == 4:
        held_out += 1
        return [held_out + share for share in shares]
    return shares
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokenizer, prompts and rewards."""
    folder = tmp_path_factory.mktemp("rl")
    rl_runs.write_inputs(folder)
    (folder / "several.py").write_text(REWARDS, encoding="utf-8")
    return folder


def nodes(adapters):
    return [{"name": name, **own} for name, own in adapters.items()]


def run(*arguments, **keys):
    """Runs it, and returns its output folder."""
    result, output = start(*arguments, **keys)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output


def run_alone(folder, name, adapter, pet=(), **keys):
    """The output folder of a run with one of several adapters alone."""
    own = {**adapter, **dict(pet)}
    rl, rate = own.pop("rl"), own.pop("learning_rate", None)
    return run(folder, name, pet=own, rate=rate, **{**keys, **rl})


def is_same(found, expected):
    """Asserts that two output folders have the same rewards, and adapters that are the same but for rounding."""
    histories = [read_history(str(output)) for output in (found, expected)]
    for series in ("reward", "reward_std", "held_out_reward", "completions/mean_length"):
        values = [history.series(series)[1].tolist() for history in histories]
        assert values[0] == values[1] and len(values[1]) == (STEPS // 2 if "held_out" in series else STEPS), series
    for series in ("kl", "teacher/kl"):
        np.testing.assert_allclose(*[history.series(series)[1] for history in histories], rtol=0, atol=1e-6)
    differences = histories[0].series("agreement/max")[1]
    assert len(differences) == STEPS and 0 < differences.max() < 1e-4
    are_same_adapters(found, expected)


def are_same_adapters(found, expected):
    """Asserts that two output folders have adapters that are the same but for rounding, the best one of one step."""
    for step in range(2, STEPS + 1, 2):
        states = [
            load_file(output / "lora_checkpoint" / f"step_{step}" / "adapter_model.safetensors")
            for output in (found, expected)
        ]
        assert states[0].keys() == states[1].keys() and states[0]
        for key, array in states[1].items():
            np.testing.assert_allclose(states[0][key], array, rtol=0, atol=1e-5, err_msg=f"step {step}: {key}")
    best = [json.loads((output / "lora_checkpoint" / "best" / "best.json").read_text()) for output in (found, expected)]
    assert best[0]["step"] == best[1]["step"]


EXPERTS = {"model_type": "qwen3_moe", "model": {"moe_aux_loss_coeff": 0.0}}
ON_EXPERTS = {"target_modules": ".*linear_proj|.*experts.*"}
# A teacher beside the rewards. The second has what a run has by itself, and stands behind the first, which is smaller.
TAUGHT = {
    "still": {
        **{"seed": 1, "lora_rank": 3},
        "rl": {"seed": 1, "num_generations": 5, "reward_funcs": "several.py:is_always_one"},
    },
    "moves": {"seed": 2, "learning_rate": 2.0e-2, "rl": {"seed": 2, "reward_funcs": "several.py:share_of_e"}},
}
OF_TAUGHT = {
    **{**EXPERTS, "teacher": "base", "structured_outputs": None, "beta": 0.0},
    "callbacks": [{"type": "EarlyStopping", "metric": "held_out_reward", "mode": "max", "patience": 1}],
}


def side_by_side(adapters=TAUGHT):
    """The keys of a run with both adapters."""
    return {"pet": {**ON_EXPERTS, "adapters": nodes(adapters)}, **OF_TAUGHT}


@pytest.fixture(scope="module")
def stopped(library, folder):
    """The output folder of a run in which one adapter stops at step 4, and the calls of its reward."""
    output = run(folder, "stopped", **side_by_side())
    return output, (folder / "calls.txt").read_text(encoding="utf-8").split()


@pytest.fixture(scope="module")
def alone(library, folder):
    """The output folder of a run with the other adapter alone."""
    return run_alone(folder, "alone", TAUGHT["moves"], ON_EXPERTS, **OF_TAUGHT)


@shows("rl", "qwen3_moe")
@shows("experts", "qwen3_moe")
def test_routed_experts_are_sampled_as_they_train(alone):
    history = read_history(str(alone))
    assert 0 < history.series("agreement/max")[1].max() < 1e-4
    assert 0 <= history.series("agreement/k2")[1].max() < 1e-10
    learned = tiny_runs.state(alone / "lora_checkpoint" / "step_6")
    assert any("experts" in name and np.abs(array).max() > 0 for name, array in learned.items() if "lora_B" in name)


def test_an_adapter_that_has_stopped_is_not_sampled_while_the_others_go_on(stopped):
    output, calls = stopped
    record = json.loads((output / "adapters.json").read_text(encoding="utf-8"))
    ended = {each["name"]: each["ended"]["step"] for each in record["adapters"] if each["ended"]}
    assert ended["still"] == 4 and "EarlyStopping" in json.dumps(read_history(str(output / "still")).events)
    # Two steps of two prompts with five answers each, and the held-out prompts, twice.
    assert calls == ["10", "10", "4"] * 2


@shows("several", "qwen3_moe")
def test_the_others_learn_what_they_learn_alone(stopped, alone):
    output, _ = stopped
    is_same(output / "moves", alone)
    of_teacher = read_history(str(alone)).series("teacher/kl")[1]
    assert len(of_teacher) == STEPS and np.abs(of_teacher[1:]).min() > 0


def test_a_resumed_run_samples_and_learns_the_same(folder, stopped):
    whole, _ = stopped
    shutil.copytree(whole, folder / "resumed")
    shutil.rmtree(folder / "resumed" / "moves" / "lora_checkpoint" / "step_6")
    result, resumed = start(folder, "resumed", resume=True, **side_by_side())
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    # It takes all graphs from those that the first run has compiled.
    assert "is not kept" not in result.stdout and "lacks this graph" not in result.stdout
    assert result.stdout.count("was taken from") == 6
    for step in ("moves/lora_checkpoint/step_6", "still/lora_checkpoint/step_4"):
        tiny_runs.assert_same_state(*(output / step for output in (whole, resumed)))


def test_the_adapters_are_compared_by_their_held_out_rewards(stopped):
    output, _ = stopped
    (comparison,) = json.loads((output / "comparison.json").read_text(encoding="utf-8"))
    assert comparison["measure"]["name"] == "held-out reward"
    series = {name: read_history(str(output / name)).series("held_out_reward") for name in TAUGHT}
    largest = {name: rewards.max() for name, (_, rewards) in series.items()}
    assert comparison["best"] == max(largest, key=largest.get)
    values = comparison["measure"]["values"]
    assert sorted(value["value"] for value in values.values()) == pytest.approx(sorted(largest.values()))
    for name, (steps, rewards) in series.items():
        assert comparison["steps"][name] == steps[rewards.argmax()]


def test_a_llama_s_adapter_does_so_on_a_base_in_four_bits(library, folder):
    """With a reference, which the first one lacks, and another algorithm."""
    first = {"seed": 1, "rl": {"seed": 1, "beta": 0.0}}
    second = {"seed": 2, "learning_rate": 2.0e-2, "rl": {"seed": 2, "algorithm": "rloo"}}
    pet = {"quantize_base": "nf4", "adapters": nodes({"first": first, "second": second})}
    output = run(folder, "llama", model_type="llama", pet=pet)
    by_itself = run_alone(folder, "llama_alone", second, {"quantize_base": "nf4"}, model_type="llama")
    is_same(output / "second", by_itself)


# Adapters that learn a teacher's distribution: one from completions of the data, one from answers of its teacher.
GENERALIZED = {
    "first": {"seed": 1, "rl": {"seed": 1, "gkd": {"beta": 0.3}}},
    "second": {
        **{"seed": 2, "learning_rate": 2.0e-2, "lora_rank": 3},
        "rl": {"seed": 2, "num_generations": 4, "gkd": {"beta": 1, "lmbda": 0.6, "seq_kd": True}},
    },
}


@pytest.fixture(scope="module")
def on_experts(mindformers, folder):
    """An adapter on linear cells and experts, with random values."""
    network = with_adapters(tiny_qwen3_moe(**rl_runs.SIZES), **{**rl_runs.PET, **ON_EXPERTS})
    values = {parameter.name: 0.2 * normal(*parameter.shape) for parameter in network.trainable_params()}
    # With values of its own, it names no base that it was trained on.
    save_lora(network, str(folder / "on_experts"), values=values)
    return str(folder / "on_experts")


def test_an_adapter_learns_the_whole_distribution_of_one_on_experts(library, folder, on_experts):
    keys = {**OF_GKD, **EXPERTS, "teacher": on_experts}
    output = run(folder, "generalized", pet={**ON_EXPERTS, "adapters": nodes(GENERALIZED)}, **keys)
    by_itself = run_alone(folder, "generalized_alone", GENERALIZED["second"], ON_EXPERTS, **keys)
    histories = [read_history(str(each)) for each in (output / "second", by_itself)]
    for series, count in {"loss": STEPS, "held_out_teacher/divergence": STEPS // 2}.items():
        values = [history.series(series)[1] for history in histories]
        assert len(values[0]) == count and values[0].all(), series
        np.testing.assert_allclose(*values, rtol=0, atol=1e-6, err_msg=series)
    are_same_adapters(output / "second", by_itself)


@pytest.mark.parametrize(
    "rl, message",
    [
        ({"reward_funcs": "several.py:forgets"}, "adapter moves: .*forgets: it returned 1 rewards for 14 completions"),
        ({"max_disagreement": 1e-9}, "adapter moves: Sampler and trainer differ by .*"),
    ],
)
def test_what_fails_ends_the_run_with_one_error_that_names_the_adapter(library, folder, rl, message):
    moves = TAUGHT["moves"]
    result, _ = start(folder, "failed", **side_by_side({**TAUGHT, "moves": {**moves, "rl": {**moves["rl"], **rl}}}))
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("mindlora-run: error:")]
    assert len(lines) == 1 and re.search(message, lines[0]), result.stderr[-2000:]
