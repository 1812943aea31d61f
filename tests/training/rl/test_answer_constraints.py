"""rl.structured_outputs: of a run, of a prompt's row, together with tools, and what cannot be used."""

import json

import numpy as np
import pytest

from mindlora.core.errors import ConfigError, DataError, RequestError
from mindlora.serving.constraints import ConstraintError
from mindlora.training.rl.prompts import AnswerConstraints, prompts_of_run
from mindlora.training.rl.settings import rl_settings
from mindlora.training.rl.tools import Tools
from tests.support.chat_templates import HERMES_TOOLS, OPENING, THINKING, chat_tokenizer
from tests.support.refusals import part, refused

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
        ({"column": "output"}, {"outputs": None}, DataError, f"{WHERE}: there is no field 'output', which"),
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
