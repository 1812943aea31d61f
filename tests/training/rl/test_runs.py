"""Runs that learn from rewards, on a Qwen3: they learn, resume bit for bit, and end with one error where they must."""

import json
import re

import pytest

from mindlora.data import tokenizers
from mindlora.training.report.history import read_history
from tests.support import rl_runs, tiny_runs
from tests.support.rl_runs import start
from tests.support.what_runs import shows

# The base of a run.
IN_16_BITS = {"model": {"params_dtype": "bfloat16"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokenizer, prompts and rewards."""
    folder = tmp_path_factory.mktemp("rl")
    rl_runs.write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(library, folder):
    """A run of six steps; its graphs are those of the one process in e2e/test_rl_ranks.py."""
    result, output = start(folder, "whole", **IN_16_BITS)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return output


@shows("rl", "qwen3")
def test_every_step_reports_rewards_and_how_far_sampler_and_trainer_are_apart(whole):
    history = read_history(str(whole))
    for name in ("reward", "reward_std", "kl", "completions/mean_length", "frac_reward_zero_std"):
        assert len(history.series(name)[0]) == 6, name
    assert 0 < max(history.series("agreement/max")[1]) < 1e-4
    assert 0 <= max(history.series("agreement/k2")[1]) < 1e-10
    kl = history.series("kl")[1]
    # The adapter begins as the reference.
    assert abs(kl[0]) < 1e-6 < kl[-1]
    assert history.series("held_out_reward")[0].tolist() == [2, 4, 6]
    assert [len(shown["answers"]) for shown in history.answers] == [2, 2]


def test_the_adapter_with_the_largest_held_out_reward_is_kept(whole):
    best = json.loads((whole / "lora_checkpoint" / "best" / "best.json").read_text(encoding="utf-8"))
    steps, rewards = read_history(str(whole)).series("held_out_reward")
    assert best["step"] == steps[rewards.argmax()]


def test_a_resumed_run_samples_and_learns_the_same(folder, whole):
    result, output = start(folder, "resumed", str(whole / "lora_checkpoint" / "step_4"), **IN_16_BITS)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    tiny_runs.assert_same_state(*(run / "lora_checkpoint" / "step_6" for run in (whole, output)))
    # It takes all graphs from those that the first run has compiled.
    assert "is not kept" not in result.stdout and "lacks this graph" not in result.stdout


@pytest.mark.parametrize(
    "rl, message",
    [
        ({"reward_funcs": "rewards.py:forgets"}, "forgets: it returned 1 rewards for 14 completions"),
        ({"max_disagreement": 1e-9}, "Sampler and trainer differ by .* rl.max_disagreement is 1e-09"),
        (
            {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 3}}},
            "rl.structured_outputs.json cannot be used: ",
        ),
    ],
)
def test_what_fails_ends_the_run_with_one_error(folder, rl, message):
    result, _ = start(folder, "failed", **IN_16_BITS, **rl)
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("mindlora-run: error:")]
    assert len(lines) == 1 and re.search(message, lines[0]), result.stderr[-2000:]


TEMPLATE = """{%- if tools %}{{- '<|im_start|>' + tools[0].function.name + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role[0] + ' ' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>a ' }}{% endif %}"""
TOOLS = '''
import json
from typing import Literal

def sees(who: Literal["a", "b"]):
    """
    Says what somebody sees.

    Args:
        who: Somebody.
    """
    if who == "b":
        raise ValueError("nobody")
    return "a tree"

def rewards_calls(prompts, completions, messages, **columns):
    for text, said in zip(completions, messages):
        rest = list(said)
        while rest:
            turn = rest.pop(0)
            assert turn["role"] == "assistant", said
            for call in turn.get("tool_calls", []) if rest else []:
                function, result = call["function"], rest.pop(0)
                who = json.loads(function["arguments"])["who"]
                assert result["role"] == "tool" and function["name"] == result["name"] == "sees", said
                assert result["content"] == {"a": "a tree", "b": "{'error': 'nobody'}"}[who], said
        assert text == said[-1]["content"] and text in ("", "bee", "dog"), said
    assert any(len(said) > 2 for said in messages), messages
    return [float(len(said)) for said in messages]
'''


@shows("rl", "llama")
@shows("nf4", "llama")
def test_on_a_base_in_four_bits_answers_call_tools_whose_results_are_not_learned(library, folder):
    made = tokenizers.load_tokenizer(str(folder / "model"))
    made.add_tokens(["<tool_call>", "</tool_call>"])
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = TEMPLATE
    made.save_pretrained(folder / "chat")
    (folder / "tools.py").write_text(TOOLS, encoding="utf-8")
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("the cat", "a dog")]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rl = {"prompts": "chats.jsonl", "held_out_prompts": None, "tokenizer": "chat"}
    rl.update(tools="tools.py:sees", reward_funcs="tools.py:rewards_calls", max_completion_length=120)
    rl.update(structured_outputs={"choice": ["bee", "dog"]})
    keys = {"model_type": "llama", "model": {"seq_length": 160}, "pet": {"quantize_base": "nf4"}}
    result, output = start(folder, "called", **keys, **rl)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    history = read_history(str(output))
    assert len(history.series("agreement/max")[0]) == 3
    assert 0 < max(history.series("agreement/max")[1]) < 1e-4
    kl = history.series("kl")[1]
    assert abs(kl[0]) < 1e-6 < kl[-1]
    assert history.series("tools/call_frequency")[1].min() > 0.1
    assert history.series("tools/failure_frequency")[1].max() < 1
