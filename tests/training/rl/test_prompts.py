"""Prompts: what a file may hold, how it becomes tokens, in which order a run answers them, and their constraints."""

import json

import numpy as np
import pytest

from mindlora.core.errors import ConfigError, DataError, RequestError
from mindlora.serving.constraints import ConstraintError
from mindlora.training.rl.prompts import AnswerConstraints, prompts_of_run, prompts_of_step, read_prompts
from mindlora.training.rl.settings import rl_settings
from mindlora.training.rl.tools import Tools
from tests.support.chat_templates import CHATML, HERMES_TOOLS, OPENING, THINKING, chat_tokenizer, word_tokenizer
from tests.support.refusals import part, refused

WORDS = "Say hello to Ben please user assistant system im_start im_end"


def written(tmp_path, *rows):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_text_begins_with_bos_and_its_other_fields_are_columns(tmp_path):
    tokenizer = word_tokenizer(None, WORDS)
    rows = [{"prompt": "Say hello", "answer": 7, "kind": "a"}, {"prompt": "to Ben", "answer": 8, "kind": "b"}]
    first, second = read_prompts(written(tmp_path, *rows), tokenizer, 9)
    expected = tokenizer.encode("Say hello", add_special_tokens=False)
    assert first.tokens == [tokenizer.bos_token_id, *expected] and first.given == "Say hello"
    assert (first.columns, second.columns) == ({"answer": 7, "kind": "a"}, {"answer": 8, "kind": "b"})


def test_messages_go_through_the_chat_template(tmp_path):
    tokenizer = word_tokenizer(CHATML, WORDS)
    messages = [{"role": "user", "content": "Say hello"}]
    (prompt,) = read_prompts(written(tmp_path, {"prompt": messages}), tokenizer, 99)
    assert prompt.tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_a_completion_ends_with_the_end_token(tmp_path):
    tokenizer = word_tokenizer(None, WORDS)
    rows = [{"prompt": "Say", "completion": "hello to Ben"}, {"prompt": "Say", "completion": "hello"}]
    settings = of_gkd(written(tmp_path, *rows))
    found, _ = prompts_of_run(settings, tokenizer, 16, str(tmp_path))
    words = [tokenizer.encode(row["completion"], add_special_tokens=False) for row in rows]
    assert [prompt.completion for prompt in found] == [[*ids, tokenizer.eos_token_id] for ids in words]
    assert prompts_of_run(of_gkd(settings.prompts, lmbda=1), tokenizer, 16, str(tmp_path))[0][0].completion == []


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "Say"}, 'has no "completion", and rl.gkd.lmbda is 0.25: 75% of the rows have the completions of'),
        ({"prompt": "Say", "completion": ["Ben"]}, 'has no "completion"'),
        ({"prompt": "Say", "completion": "hello to Ben please"}, "a completion of 5 tokens, and rl.max_completion_len"),
    ],
)
def test_a_completion_that_cannot_be_learned_is_refused(tmp_path, row, message):
    settings = of_gkd(written(tmp_path, row), lmbda=0.25)
    refused(DataError, part(message), prompts_of_run, settings, word_tokenizer(None, WORDS), 16, str(tmp_path))


def of_gkd(path, **gkd):
    return rl_settings({"prompts": path, "teacher": "base", "max_completion_length": 4, "gkd": gkd})


def test_every_pass_has_each_prompt_once_in_an_order_of_its_own():
    passes = [np.concatenate([prompts_of_step(7, step, 2, seed=3) for step in range(3 * n, 3 * n + 3)]) for n in (0, 1)]
    for order in passes:
        assert len(set(order.tolist())) == 6 and set(order.tolist()) <= set(range(7))
    assert passes[0].tolist() != passes[1].tolist()
    assert prompts_of_step(7, 4, 2, seed=3).tolist() == passes[1][2:4].tolist()
    assert np.concatenate([prompts_of_step(7, step, 2, seed=4) for step in range(3)]).tolist() != passes[0].tolist()


@pytest.mark.parametrize(
    "rows, expected",
    [
        (
            [{"promt": "x"}],
            part("prompts.jsonl, line 1: \"prompt\" is missing. It has 'promt'. Write a text, or a list"),
        ),
        ([{"prompt": "Say"}, {"prompt": ""}], part('line 2: "prompt" is missing')),
        ([["Say"]], part('line 1: "prompt" is missing')),
        (
            [{"prompt": "Say hello to Ben"}],
            part("the prompt has 5 tokens, and seq_length less max_completion_length leaves 4."),
        ),
        ([{"prompt": "Say", "answer": 1}, {"prompt": "to"}], part("line 2: 'answer' is a field of some rows alone.")),
        ([{"prompt": [{"role": "user", "content": "Say"}]}], part("chat template")),
        ([], part("has no rows. Write one for each prompt.")),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_its_line(tmp_path, rows, expected):
    refused(DataError, expected, read_prompts, written(tmp_path, *rows), word_tokenizer(None, WORDS), 4)


# rl.structured_outputs: of a run, of a prompt's row, together with tools, and what cannot be used


pytest.importorskip("llguidance")
WHERE = "prompts.jsonl, line 3"


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(HERMES_TOOLS)


def keeps(grammar, tokenizer, text):
    """Whether the grammar lets an answer be this text, and end there."""
    ends = frozenset([tokenizer.eos_token_id])
    matcher = grammar.matcher(ends)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    logits = np.zeros(len(tokenizer), np.float32)
    for count, token in enumerate([*tokens, tokenizer.eos_token_id]):
        if np.isinf(matcher.mask(logits, tokens[:count])[token]):
            return False
    return True


@pytest.mark.parametrize(
    "node, kept, not_kept",
    [
        ({"json": {"enum": ["cat", 7]}}, ['"cat"', "7"], ["cat", "8"]),
        ({"json": '{"type": "integer"}'}, ["12"], ["x"]),
        ({"json": "schema.json"}, ['{"a":1}'], ['{"a":"1"}', "{}"]),
        ({"json_object": True}, ['{"b":"x"}'], ["3"]),
        ({"regex": "[a-c]+"}, ["abc"], ["", "d"]),
        ({"choice": ["yes", "no"]}, ["no"], ["maybe"]),
        ({"grammar": 'start: "a" "b"'}, ["ab"], ["a"]),
    ],
)
def test_an_answer_is_what_the_run_says(tokenizer, tmp_path, node, kept, not_kept):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    grammar = AnswerConstraints(node, tokenizer, str(tmp_path)).grammar({}, WHERE)
    assert all(keeps(grammar, tokenizer, text) for text in kept)
    assert not any(keeps(grammar, tokenizer, text) for text in not_kept)


def test_a_column_says_what_the_answer_to_its_prompt_is(tokenizer, tmp_path):
    constraints = AnswerConstraints({"column": "outputs"}, tokenizer, str(tmp_path))
    first, text, nothing, again = (
        constraints.grammar({"outputs": outputs}, WHERE)
        for outputs in ({"regex": "a"}, '{"choice": ["b"]}', None, {"regex": "a"})
    )
    assert keeps(first, tokenizer, "a") and keeps(text, tokenizer, "b") and not keeps(text, tokenizer, "a")
    assert nothing is None and first is again
    assert constraints.grammar({"outputs": {"json_object": False}}, WHERE) is None


# As Qwen3's: a prompt has an empty thought where none is wanted.
SWITCHED = THINKING.replace(
    "assistant\\n' }}{% endif %}",
    "assistant\\n' }}{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
)


@pytest.mark.parametrize(
    "template, prompt, variables, kept, not_kept",
    [
        (SWITCHED, "messages", None, ["no", "<think>\nWell: yes?\n</think>\n\nno"], ["<think>\nno", "Well: no"]),
        (SWITCHED, "messages", {"enable_thinking": False}, ["no"], ["<think>\nWell\n</think>\n\nno"]),
        (OPENING, "messages", None, ["Well\n</think>\n\nno"], ["no", "Well"]),
        (SWITCHED, "a text", None, ["no"], ["<think>\nWell\n</think>\n\nno"]),
    ],
    ids=["may think", "does not think", "has begun to think", "a text"],
)
def test_a_thought_may_come_first_where_the_template_knows_thoughts(
    tmp_path, template, prompt, variables, kept, not_kept
):
    tokenizer = chat_tokenizer(template)
    row = {"prompt": [{"role": "user", "content": "Is it?"}] if prompt == "messages" else prompt}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row), encoding="utf-8")
    settings = rl_settings({
        "prompts": str(tmp_path / "prompts.jsonl"), "reward_funcs": "exact_answer", "chat_template_kwargs": variables,
        "structured_outputs": {"choice": ["yes", "no"]},
    })  # fmt: skip
    (found,), _ = prompts_of_run(settings, tokenizer, 1024, str(tmp_path))
    assert [keeps(found.grammar, tokenizer, text) for text in kept] == [True] * len(kept)
    assert [keeps(found.grammar, tokenizer, text) for text in not_kept] == [False] * len(not_kept)


def test_with_tools_an_answer_is_a_call_or_what_is_said(tokenizer, tmp_path):
    parameters = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tools = Tools(tokenizer, [{"type": "function", "function": {"name": "add", "parameters": parameters}}], None)
    call = '<tool_call>\n{"name": "add", "arguments": {"n":%s}}\n</tool_call>'
    one_of_two = AnswerConstraints({"choice": ["yes"]}, tokenizer, str(tmp_path), tools).grammar({}, WHERE)
    anything = AnswerConstraints(None, tokenizer, str(tmp_path), tools).grammar({}, WHERE)
    for grammar in (one_of_two, anything):
        assert keeps(grammar, tokenizer, call % 2) and not keeps(grammar, tokenizer, call % 3)
    assert keeps(one_of_two, tokenizer, "yes") and not keeps(one_of_two, tokenizer, "no")
    assert keeps(anything, tokenizer, "no")


@pytest.mark.parametrize(
    "node, columns, kind, message",
    [
        ({"regex": "("}, {}, ConstraintError, "rl.structured_outputs.regex cannot be used: "),
        ({"json": {"enum": []}}, {}, ConstraintError, "rl.structured_outputs.json cannot be used: "),
        ({"json": "nowhere.json"}, {}, ConfigError, "rl.structured_outputs: json is nowhere.json, and "),
        ({"column": "output"}, {"outputs": None}, DataError, f"{WHERE}: the row has no field 'output', which"),
        ({"column": "outputs"}, {"outputs": "{"}, DataError, f"{WHERE}: outputs is not JSON: "),
        ({"column": "outputs"}, {"outputs": {"regx": "a"}}, DataError, f"{WHERE}: outputs has no key 'regx'."),
        (
            {"column": "outputs"},
            {"outputs": {"regex": "["}},
            ConstraintError,
            f"{WHERE}: outputs.regex cannot be used: ",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(tokenizer, tmp_path, node, columns, kind, message):
    constraints = AnswerConstraints(node, tokenizer, str(tmp_path))
    refused(kind, part(message), constraints.grammar, columns, WHERE)


def test_without_the_library_an_error_says_what_to_install(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("mindlora.serving.constraints.llguidance", None)
    constraints = AnswerConstraints({"regex": "a"}, tokenizer, str(tmp_path))
    message = "rl.structured_outputs.regex needs llguidance, .* pip install 'mindlora.rl.' there."
    with pytest.raises(RequestError, match=message):
        constraints.grammar({}, WHERE)
