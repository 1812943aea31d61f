"""Multiple choice: numpy on the whole logits chooses alike, as it stands and for its length."""

import json

import numpy as np
import pytest

from mindlora.core.errors import DataError
from mindlora.serving.chat_prompt import choose_prompt_form
from mindlora.serving.evaluation.questions import Question, measure_choices, passages_of, read_questions, split_tokens
from mindlora.serving.evaluation.texts import start_tokens
from tests.support.tiny_serving import tokenizer

CHOICES = ["eat", "sleep and eat", "are dogs as well, 2 of them", "cats"]
QUESTIONS = [
    Question(f"The {noun} that {verb}", CHOICES[: 2 + n % 3], n % 2)
    for n, (noun, verb) in enumerate(
        (noun, verb) for noun in ("cats", "dogs", "2 of them") for verb in ("are", "sleep")
    )
]


def encode(text):
    return tokenizer().encode(text, add_special_tokens=False)


def test_the_likeliest_choice_is_taken(evaluated):
    form = choose_prompt_form(tokenizer(), "none")
    by_sum, by_length = measure_choices(evaluated.engine, QUESTIONS, form, evaluated.models, "q", 0)
    start = start_tokens(tokenizer())
    for model in evaluated.models:
        right = []
        for question in QUESTIONS:
            sums = []
            for choice in question.choices:
                context = [*start, *encode(question.text)]
                tokens = [*start, *encode(f"{question.text} {choice}")]
                assert tokens[: len(context)] == context
                table = evaluated.logprobs(tokens[:-1], model)
                sums.append(sum(table[place - 1, tokens[place]] for place in range(len(context), len(tokens))))
            scaled = np.array(sums) / [len(choice) for choice in question.choices]
            right.append([np.argmax(sums) == question.answer, scaled.argmax() == question.answer])
        expected = np.mean(right, axis=0)
        values = [found.values[model or "base"].value for found in (by_sum, by_length)]
        assert values == pytest.approx(expected)
    assert (by_sum.examples, by_sum.smaller_is_better) == (6, False)


def test_a_space_belongs_to_the_continuation():
    for context, continuation in (("The cats", " eat"), ("The cats ", "eat")):
        passage = split_tokens(tokenizer(), [3], context, continuation)
        assert passage.tokens == [3, *encode("The cats eat")] and passage.first == 1 + len(encode("The cats"))
    alone = split_tokens(tokenizer(), [], "", "The cats")
    assert (alone.tokens, alone.first) == (encode("The cats"), 1)


def test_a_prompt_of_training_comes_before_each_choice():
    form = choose_prompt_form(tokenizer(), "Q: {instruction}\\nA: ")
    for passage, choice in zip(passages_of(QUESTIONS[0], form, tokenizer(), [3]), QUESTIONS[0].choices):
        prompt = form.tokens(QUESTIONS[0].text)
        assert passage.tokens == [*prompt, *encode(choice)] and passage.first == len(prompt)


def test_an_answer_is_an_index_or_a_text(tmp_path):
    rows = [{"question": "Q", "choices": ["a", "b"], "answer": answer} for answer in (1, "b")]
    path = tmp_path / "q.json"
    path.write_text(json.dumps(rows))
    assert read_questions(str(path)) == [Question("Q", ["a", "b"], 1)] * 2


@pytest.mark.parametrize(
    "change, words",
    [
        ({"question": 1}, "has no text in its column 'question'"),
        ({"choices": ["a"]}, "choices must be a list of at least two texts"),
        ({"choices": ["a", ""]}, "choices must be a list of at least two texts"),
        ({"answer": 2}, "answer is 2, and must be the index of a choice, 0 to 1"),
        ({"answer": True}, "answer is True"),
        ({"answer": "c"}, "answer is 'c'"),
    ],
)
def test_a_wrong_row_is_named(tmp_path, change, words):
    path = tmp_path / "q.jsonl"
    right = {"question": "Q", "choices": ["a", "b"], "answer": 1}
    path.write_text("\n".join(json.dumps(row) for row in (right, {**right, **change})))
    with pytest.raises(DataError, match=f"line 2.*{words}"):
        read_questions(str(path))
