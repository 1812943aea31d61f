"""Answers checked by a rule: what is compared, and the answers that the engine gives."""

import json

import pytest

from mindlora.core.errors import DataError, RequestError
from mindlora.serving.chat_prompt import choose_prompt_form
from mindlora.serving.evaluation.questions import Task, exact, measure_answers, number, read_tasks
from mindlora.serving.request import Sampling
from tests.support.tiny_serving import tokenizer

GREEDY = Sampling(max_tokens=8, temperature=0.0)
PROMPTS = ["The cats", "The dogs", "2 of them", "There are", "Sleep", "Eat and", "As well"]


@pytest.mark.parametrize(
    "text, found",
    [
        ("6 * 3 = 18, so\n#### 18", "18"),
        ("#### 1,234.50 of them", "1234.5"),
        ("####$-7.", "-7"),
        ("#### 10", "10"),
        ("#### 10.0", "10"),
        ("18", None),
        ("#### many", None),
    ],
)
def test_a_number_stands_after_four_signs(text, found):
    assert number(text) == found


def test_exact_answers_may_differ_in_the_space_around_them():
    assert exact(" Two cats.\n") == "Two cats."


def test_the_greedy_answer_is_compared(evaluated):
    engine, form = evaluated.engine, choose_prompt_form(tokenizer(), "none")
    answers = {
        model: [engine.submit(form.tokens(prompt), GREEDY, model).text() for prompt in PROMPTS]
        for model in evaluated.models
    }
    assert answers[None] != answers["first"]
    tasks = [Task("line 1", prompt, answer) for prompt, answer in zip(PROMPTS, answers["first"])]
    found = measure_answers(engine, tasks, form, GREEDY, "exact", evaluated.models, "a.jsonl", 0)
    for model in evaluated.models:
        pairs = zip(answers[model], answers["first"])
        equal = sum(one.strip() == other.strip() for one, other in pairs) / len(PROMPTS)
        assert found.values[model or "base"].value == pytest.approx(equal)
    assert found.values["first"].value == 1 and found.verdicts["first"] == "better"


def test_a_question_without_room_for_an_answer_is_named(evaluated):
    form = choose_prompt_form(tokenizer(), "none")
    with pytest.raises(RequestError, match="line 3: the question has"):
        tasks = [Task("line 3", "The cats eat. " * 40, "Yes")]
        measure_answers(evaluated.engine, tasks, form, GREEDY, "exact", [None], "a.jsonl", 0)


def test_rows_have_either_names_of_columns(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"instruction": "Q", "output": "#### 3"}))
    assert read_tasks(str(path), "number") == [Task("line 1", "Q", "#### 3")]


@pytest.mark.parametrize(
    "row, words",
    [
        ({"question": "Q", "answer": "3"}, "line 1: the answer has no number after ####"),
        ({"question": "", "answer": "#### 3"}, "line 1 has no text in its column 'question'"),
        ({"question": "Q", "answer": 3}, "line 1 has no text in its column 'answer'"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, words):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=words):
        read_tasks(str(path), "number")
