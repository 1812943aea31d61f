"""The process of the reward functions: what it returns, and every way in which a function can fail it."""

import logging
import os

import numpy as np
import pytest

from mindlora.core.errors import RewardError
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.settings import rl_settings

FUNCTIONS = """
import asyncio, os, subprocess, sys, time
import numpy as np

def words(prompts, completions, **columns):
    return [len(text.split()) for text in completions]

def some(prompts, completions, keep, **columns):
    return [None if not each else np.float32(0.5) for each in keep]

async def later(completions, **columns):
    await asyncio.sleep(0)
    return np.arange(len(completions))

def where(completions, **columns):
    return [os.getpid(), float("mindspore" in sys.modules)]

def prints(completions, **columns):
    print("judged", len(completions))
    return [True] * len(completions)

def raises(completions, **columns):
    def inner():
        return 1 / 0
    return inner()

def exits(completions, **columns):
    sys.exit("no more")

def crashes(completions, **columns):
    print("before the crash")
    os._exit(3)

def aborts(completions, **columns):
    os.abort()

def hangs(completions, **columns):
    child = subprocess.Popen(["sleep", "600"])
    print("child", child.pid)
    while True:
        pass

def nothing(completions, **columns):
    return [None] * len(completions)

def fewer(completions, **columns):
    return [1.0]

def number(completions, **columns):
    return 1.0

def text(completions, **columns):
    return ["1.0"] * len(completions)

def not_finite(completions, **columns):
    return [0.0, float("nan")]
"""
PROMPTS, COMPLETIONS = ["p", "p"], ["one", "two words"]


@pytest.fixture
def make(tmp_path):
    """Returns a function that starts the process of some functions of FUNCTIONS."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    made = []

    def start(*names, **keys):
        functions = [name if ":" in name else f"rewards.py:{name}" for name in names]
        made.append(Rewards(rl_settings({"reward_funcs": functions, **keys}), str(tmp_path)))
        return made[-1]

    yield start
    for rewards in made:
        rewards.close()


def test_rewards_of_several_functions(make):
    rewards = make("words", "some", "later", "where")
    for _ in range(2):
        found = rewards.of(PROMPTS, COMPLETIONS, {"keep": [True, False]})
        np.testing.assert_array_equal(found[:, :3], [[1, 0.5, 0], [2, np.nan, 1]])
        assert found.dtype == np.float64
        # Another process, the same one for all steps, and without MindSpore.
        assert found[0, 3] == rewards._process.pid != os.getpid() and found[1, 3] == 0


def test_what_functions_print_goes_to_the_log(make, caplog):
    with make("prints") as rewards, caplog.at_level(logging.INFO, "mindlora"):
        assert rewards.of(PROMPTS, COMPLETIONS, {}).tolist() == [[1], [1]]
        rewards.close()
        rewards._reader.join()
    assert "rl.reward_funcs: judged 2" in caplog.messages


@pytest.mark.parametrize(
    "name, message",
    [
        ("raises", r"rl.reward_funcs: raises: it raised ZeroDivisionError:.*line \d+, in inner\n.*1 / 0.*Correct the"),
        ("exits", "exits: it raised SystemExit:.*no more"),
        ("some", "some: it raised TypeError:.*missing 1 required positional argument: 'keep'"),
        ("fewer", "fewer: it returned 1 rewards for 2 completions. Return one for each"),
        ("number", "number: it returned 1.0, but it must return a list"),
        ("text", "text: it returned '1.0' for completion 0, but a reward must be a finite number, or None"),
        ("not_finite", "not_finite: it returned nan for completion 1, but a reward must be a finite number"),
        ("nothing", "nothing returned None for all 2 completions of a step, so there is nothing to learn from. Change"),
    ],
)
def test_what_a_function_can_do_wrong(make, name, message):
    rewards = make("words", name)
    if name == "nothing":
        assert np.isnan(rewards.of(PROMPTS, COMPLETIONS, {})[:, 1]).all()
        rewards = make("nothing")
    with pytest.raises(RewardError, match=f"(?s){message}") as caught:
        rewards.of(PROMPTS, COMPLETIONS, {})
    # The error shows the user's code, not what called it.
    assert "reward_process" not in str(caught.value)


@pytest.mark.parametrize("name, end", [("crashes", "exit code 3"), ("aborts", "SIGABRT")])
def test_a_function_that_ends_its_process(make, monkeypatch, name, end):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    rewards = make(name)
    with pytest.raises(RewardError, match=f"{name} has ended its process \\({end}\\). Correct the function") as caught:
        rewards.of(PROMPTS, COMPLETIONS, {})
    assert ("before the crash" in str(caught.value)) == (name == "crashes")


def test_a_function_that_hangs_is_stopped_with_what_it_has_started(make, caplog):
    rewards = make("hangs", reward_timeout=1.0)
    with caplog.at_level(logging.INFO, "mindlora"), pytest.raises(RewardError) as caught:
        rewards.of(PROMPTS, COMPLETIONS, {})
    message = str(caught.value)
    assert message.startswith("rl.reward_funcs: hangs has not returned after 1 s and was stopped. Make it faster, or r")
    assert "in hangs" in message
    (child,) = [int(line.split()[-1]) for line in caplog.messages if "child" in line]
    assert ended(child)


def ended(process):
    """Returns whether a process is gone, or a zombie that nobody has waited for."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_a_file_that_cannot_be_loaded(make, tmp_path):
    with pytest.raises(RewardError, match="rl.reward_funcs: word: .*rewards.py has no function word. Did you mean"):
        make("word")
    (tmp_path / "wrong.py").write_text("import a_module_that_is_not_there")
    with pytest.raises(RewardError, match="(?s)f: it raised ModuleNotFoundError:.*wrong.py.*a_module_that_is_not"):
        make("wrong.py:f")


def test_a_column_that_has_the_name_of_an_argument(make):
    with pytest.raises(RewardError, match="The data has a column completions, .*Rename the column"):
        make("words").of(PROMPTS, COMPLETIONS, {"completions": ["a", "b"]})


def test_the_process_ends_with_the_trainer(make):
    """Its connection ends with the process that started it, whatever ended that."""
    rewards = make("words")
    rewards._connection.close()
    assert rewards._process.wait(20) == 0
