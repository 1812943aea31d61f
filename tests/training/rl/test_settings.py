"""The section rl of a YAML: its defaults, what it may name, and what is refused."""

import dataclasses
import os
import re

import pytest
import yaml

from mindlora.core.errors import ConfigError
from mindlora.training.rl.reward_functions import BUILT_IN
from mindlora.training.rl.settings import RlSettings, rl_settings
from tests.conftest import ROOT

FUNCTION = "rewards.py:short"


def test_defaults_are_trls():
    settings = rl_settings({"reward_funcs": FUNCTION})
    assert (settings.algorithm, settings.loss_type, settings.scale_rewards) == ("grpo", "dapo", "group")
    assert (settings.num_generations, settings.beta, settings.num_iterations, settings.temperature) == (8, 0, 1, 1)
    assert (settings.epsilon, settings.epsilon_high, settings.delta) == (0.2, 0.2, None)
    assert (settings.max_completion_length, settings.top_p, settings.top_k, settings.stop) == (512, 1, 0, ())
    assert settings.rows == 64 and settings.reward_weights == (1.0,)


def test_what_is_written_holds():
    settings = rl_settings(
        {
            "algorithm": "rloo",
            "reward_funcs": [FUNCTION, "exact_answer"],
            "reward_weights": [2, -0.5],
            "epsilon_high": 0.28,
            "normalize_advantages": True,
            "prompts_per_step": 3,
            "num_generations": 2,
            "stop": ["\n\n"],
        }
    )
    assert (settings.reward_weights, settings.epsilon_high, settings.rows) == ((2.0, -0.5), 0.28, 6)
    assert settings.normalize_advantages and settings.stop == ("\n\n",)


@pytest.mark.parametrize("value, name", [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_can_be_a_flag_as_in_trl(value, name):
    assert rl_settings({"reward_funcs": FUNCTION, "scale_rewards": value}).scale_rewards == name


def test_each_function_has_a_name_of_its_own():
    regexes = [{"type": "regex", "pattern": pattern} for pattern in "ab"]
    served = [{"type": "http://localhost:8000", "model": "helpful"}, "http://localhost:8001"]
    settings = rl_settings({"reward_funcs": [*regexes, "folder/rewards.py:short", *served]})
    assert settings.reward_names == ("regex", "regex_2", "short", "helpful", "reward_model")


@pytest.mark.parametrize(
    "node, message",
    [
        ("grpo", "rl is 'grpo', but it must be a node"),
        ({}, "rl has no reward_funcs. Name what rates"),
        ({"num_generation": 4}, "rl has no key 'num_generation'. Did you mean 'num_generations'"),
        ({"algorithm": "gpro"}, "rl.algorithm is 'gpro', but it must be one of grpo, rloo. Did you mean 'grpo'"),
        ({"loss_type": "cispo"}, "rl.loss_type is 'cispo', but it must be one of dapo, grpo, dr_grpo, bnpo"),
        ({"scale_rewards": None}, "rl.scale_rewards is None, but it must be one of group, batch, none"),
        ({"importance_sampling_level": "answer"}, "rl.importance_sampling_level is 'answer', but it must be one of"),
        ({"num_generations": 1}, "rl.num_generations is 1: it must be a whole number of at least 2"),
        ({"prompts_per_step": 2.5}, "rl.prompts_per_step is 2.5"),
        ({"beta": -0.1}, "rl.beta is -0.1"),
        ({"epsilon": "0.2"}, "rl.epsilon is '0.2'"),
        ({"epsilon_high": -1}, "rl.epsilon_high is -1"),
        ({"delta": 0}, "rl.delta is 0"),
        ({"temperature": 0}, "rl.temperature is 0: it must be a number above 0"),
        ({"top_p": 1.5}, "rl.top_p is 1.5"),
        ({"top_k": -1}, "rl.top_k is -1"),
        ({"stop": "end"}, "rl.stop is 'end'"),
        ({"chat_template_kwargs": "x"}, "rl.chat_template_kwargs is 'x', but it must be a node with variables"),
        ({"structured_outputs": "yes"}, "rl.structured_outputs is 'yes'. Write one of {json: schema.json}"),
        ({"structured_outputs": {"regx": "a"}}, "rl.structured_outputs has no key 'regx'. Did you mean 'regex'?"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "rl.structured_outputs has 2 keys. Write one of"),
        ({"structured_outputs": {"column": 3}}, "rl.structured_outputs: column is 3. Write the name"),
        ({"structured_outputs": {"regex": "a"}, "teacher": "base"}, "rl has structured_outputs and a teacher"),
        ({"tools": FUNCTION, "teacher": "base"}, "rl has tools and a teacher"),
        ({"tools": ["exact_answer"]}, "rl.tools[0] is 'exact_answer'. Write a function of a Python file"),
        ({"tools": [3]}, "rl.tools[0] is 3, but it must be a name"),
        ({"max_tool_calling_iterations": 2}, "rl has max_tool_calling_iterations and no tools"),
        ({"tools": FUNCTION, "max_tool_calling_iterations": 0}, "rl.max_tool_calling_iterations is 0"),
        ({"mask_truncated_completions": 1}, "rl.mask_truncated_completions is 1: it must be True or False"),
        ({"max_disagreement": 0}, "rl.max_disagreement is 0"),
        ({"reward_timeout": float("inf")}, "rl.reward_timeout is inf"),
        ({"reward_weights": [1.0, 2.0]}, "rl.reward_weights is [1.0, 2.0], and rl.reward_funcs has 1 functions"),
        ({"reward_weights": ["1"]}, "rl.reward_weights is '1': it must be a number"),
        ({"normalize_advantages": True}, "rl.normalize_advantages belongs to rloo, but rl.algorithm is grpo. Remove"),
        ({"algorithm": "rloo", "delta": 2.0}, "rl.delta belongs to grpo, but rl.algorithm is rloo. Remove"),
        ({"algorithm": "rloo", "loss_type": "dapo"}, "rl.loss_type belongs to grpo, but rl.algorithm is rloo"),
        ({"reward_funcs": []}, "rl.reward_funcs is [], but it must name a reward function or several"),
        ({"reward_funcs": 3}, "rl.reward_funcs is 3, but it must name"),
        ({"reward_funcs": [FUNCTION, 3]}, "rl.reward_funcs[1] is 3, but it must be a name"),
        ({"reward_funcs": "exact_anser"}, "rl.reward_funcs names 'exact_anser', which is neither a function"),
        ({"reward_funcs": "exact_anser"}, "Did you mean 'exact_answer'"),
        ({"reward_funcs": "rewards.py"}, "rl.reward_funcs names 'rewards.py', which is neither a function"),
        ({"reward_funcs": "regex"}, "rl.reward_funcs: regex needs pattern. Write {type: regex, pattern: ...}"),
        ({"reward_funcs": {"type": "regex", "pattern": "("}}, "regex: pattern is '(', which is not a regular expr"),
        ({"reward_funcs": {"type": "regex", "pattern": ["a"]}}, "regex: pattern is ['a']: it must be a regular"),
        ({"reward_funcs": {"type": "exact_answer", "colum": "x"}}, "exact_answer has no argument 'colum'. Did you"),
        ({"reward_funcs": {"type": "exact_answer", "column": 1}}, "exact_answer: column is 1: it must be the name"),
        ({"reward_funcs": {"type": FUNCTION, "x": 1}}, "rewards.py:short has no argument 'x'. It takes no arguments"),
        ({"reward_funcs": "length"}, "length: min_words and max_words are missing. Set one"),
        ({"reward_funcs": {"type": "length", "min_words": 5, "max_words": 3}}, "max_words is 3 and min_words is 5"),
        ({"reward_funcs": {"type": "json_schema", "schema": 3}}, "json_schema: schema is 3: it must be a schema"),
        ({"reward_funcs": {"type": "http://localhost:8000", "model": 3}}, "model is 3: it must be the name of a model"),
    ],
)
def test_what_is_refused(node, message):
    if isinstance(node, dict) and node:
        node = {"reward_funcs": FUNCTION, **node}
    with pytest.raises(ConfigError, match=re.escape(message)):
        rl_settings(node)


def test_the_page_has_every_key_and_every_function():
    with open(os.path.join(ROOT, "docs", "rl.md"), encoding="utf-8") as file:
        page = file.read()
    (example,) = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)]
    assert rl_settings(example["runner_wrapper"]["rl"]).reward_weights == (0.5, 1.0, 1.0, 0.2)
    rows = re.findall(r"^\| (`[^|]+`) \|", page.partition("## Keys")[2].partition("## Losses")[0], re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == {field.name for field in dataclasses.fields(RlSettings)}
    assert all(re.search(rf"^\| `{name}` \|", page, re.M) for name in BUILT_IN)


def gkd(**keys):
    return {"teacher": "base", "gkd": {}, **keys}


def test_gkd_has_trls_defaults():
    settings = rl_settings(gkd())
    assert (settings.gkd.beta, settings.gkd.lmbda, settings.gkd.seq_kd) == (0.5, 0.5, False)
    assert settings.num_generations == 1 and settings.best_metric == "teacher/divergence"
    settings = rl_settings(gkd(gkd={"seq_kd": True}, num_generations=3, temperature=0.9, top_p=0.9))
    assert settings.num_generations == 3 and not settings.gkd.reads_completions


@pytest.mark.parametrize(
    "node, message",
    [
        ({"gkd": True}, "rl.gkd is True, but it must be a node, such as {beta: 0.5, lmbda: 1.0}"),
        ({"gkd": {"lambda": 1}}, "rl.gkd has no key 'lambda'. Did you mean 'lmbda'"),
        ({"gkd": {"beta": 1.5}}, "rl.gkd.beta is 1.5: it must be a number from 0 to 1"),
        ({"gkd": {"lmbda": -1}}, "rl.gkd.lmbda is -1"),
        ({"gkd": {"seq_kd": 1}}, "rl.gkd.seq_kd is 1: it must be True or False"),
        ({"beta": 0.1}, "rl.beta and rl.gkd do not go together: .* Write gkd: {beta: ...}"),
        ({"reward_funcs": FUNCTION}, "rl.reward_funcs and rl.gkd do not go together"),
        ({"num_iterations": 2}, "rl.num_iterations and rl.gkd do not go together: .* Remove one of both"),
        ({"teacher": None}, "rl has gkd and no teacher. Name a teacher"),
        ({"teacher": {"url": "http://a", "model": "b"}}, "rl.gkd compares the whole vocabulary, which"),
    ],
)
def test_what_gkd_refuses(node, message):
    with pytest.raises(ConfigError, match=message):
        rl_settings(gkd(**node))
