"""Prompts: what a file may hold, how it becomes tokens, and in which order a run answers them."""

import json

import numpy as np
import pytest

from mindlora.core.errors import DataError
from mindlora.training.rl.prompts import prompts_of_run, prompts_of_step, read_prompts
from mindlora.training.rl.settings import rl_settings
from tests.support.chat_templates import CHATML, word_tokenizer
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
