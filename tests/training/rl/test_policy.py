"""Who is asked for the rows of a step: processes ask together what one asks, with the same random streams."""

import numpy as np
import pytest

from mindlora.training.rl.gkd import GkdPolicy
from mindlora.training.rl.policy import Policy, Processes
from mindlora.training.rl.prompts import Prompt
from mindlora.training.rl.rollouts import TEACHER
from mindlora.training.rl.settings import rl_settings

REWARDS = {"reward_funcs": "exact_answer", "prompts_per_step": 4, "num_generations": 3}
TAUGHT = {"teacher": "base", "gkd": {"lmbda": 0.6, "seq_kd": True}, "prompts_per_step": 4, "num_generations": 3}


def policy_of(kind, keys, rank=0, count=1):
    """A policy with ten prompts and five that are held out, in one of ``count`` processes."""
    policy = kind("", rl_settings(keys), 3)
    policy.processes.rank, policy.processes.count = rank, count
    prompts = [Prompt(f"{number}", [number], {}) for number in range(15)]
    policy.prompts, policy.held_out = prompts[:10], prompts[10:]
    return policy


def rows_of(question):
    """Who answers which prompt by which random stream, for each row of a question."""
    each = question.generations or question.settings.num_generations
    prompts = [prompt.given for prompt in question.prompts for _ in range(each)]
    return [(question.adapter, question.seed, question.first + row, given) for row, given in enumerate(prompts)]


def asked(policies, step):
    return sorted(
        (row for policy in policies for question in policy.questions(step) for row in rows_of(question)), key=repr
    )


@pytest.mark.parametrize("kind, keys", [(Policy, REWARDS), (GkdPolicy, TAUGHT)])
@pytest.mark.parametrize("count", [2, 4])
def test_processes_ask_together_what_one_asks(kind, keys, count):
    policies = [policy_of(kind, keys, rank, count) for rank in range(count)]
    for step in range(3):
        expected = asked([policy_of(kind, keys)], step)
        assert len(expected) == 12 and asked(policies, step) == expected


@pytest.mark.parametrize("teacher, who", [("an/adapter", TEACHER), ("base", None)])
def test_the_teacher_is_asked_for_the_rows_that_the_policy_does_not_answer(teacher, who):
    policy = policy_of(GkdPolicy, {**TAUGHT, "teacher": teacher})
    own, others = policy.questions(0)
    assert (own.adapter, others.adapter) == (policy.adapter, who)
    assert own.prompts and others.prompts and len(own.prompts) + len(others.prompts) == 12
    policy = policy_of(GkdPolicy, {**TAUGHT, "teacher": teacher, "gkd": {"lmbda": 0.6}})
    assert [question.adapter for question in policy.questions(0)] == [policy.adapter]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_held_out_prompts_that_cannot_be_shared_evenly_are_answered_once_more(count):
    (expected,) = [rows_of(policy_of(Policy, REWARDS).held_out_question())]
    parts = [rows_of(policy_of(Policy, REWARDS, rank, count).held_out_question()) for rank in range(count)]
    assert len({len(part) for part in parts}) == 1
    assert sum(parts, [])[:5] == expected and all(row[3] == "14" for row in sum(parts, [])[5:])


def test_alone_all_rows_are_ones_own():
    values, alone = np.arange(6.0).reshape(3, 2), Processes()
    assert alone.gather(values) is values
    np.testing.assert_array_equal(alone.own(values), values)
    with pytest.raises(KeyError, match="as it is"), alone.fail_together():
        raise KeyError("as it is")
