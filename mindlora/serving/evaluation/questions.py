"""Questions: multiple choice by the likeliest answer, and free answers checked by a rule."""

import dataclasses
import re
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from mindlora.core.errors import DataError, RequestError
from mindlora.data import tokenizers
from mindlora.data.conversion import progress
from mindlora.data.sources import Layout, read_inputs
from mindlora.serving.chat_prompt import PromptForm
from mindlora.serving.engine import Engine
from mindlora.serving.evaluation.statistics import Measure, measure
from mindlora.serving.evaluation.texts import Model, Passage, Scores, ask, score, start_tokens
from mindlora.serving.request import Sampling

_LAYOUT = Layout(("question", "choices", "answer"))
_ANSWER_LAYOUT = Layout(("question", "answer"), aliases={"question": "instruction", "answer": "output"})
# The end of GSM8K's answers (Cobbe et al., 2021).
_NUMBER = re.compile(r"####\s*([-$]*[0-9.,]*[0-9])")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its choices, two or more, and the index of the right one."""

    text: str
    choices: List[str]
    answer: int


def read_questions(path: str) -> List[Question]:
    """Returns the rows of a file with the columns question, choices (a list of texts) and answer (an index or a text).

    Raises DataError if the file cannot be read, or a row is invalid.
    """
    return [_question(row.location, row.record) for row in read_inputs(path, _LAYOUT)[0].rows]


def _question(location: str, record: Any) -> Question:
    if not isinstance(record, dict) or not isinstance(record.get("question"), str):
        raise DataError(f"{location} has no text in its column 'question'. Correct the row, or remove it.")
    choices, answer = record.get("choices"), record.get("answer")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(text, str) and text for text in choices):
        raise DataError(f"{location}: choices must be a list of at least two texts. Correct the row, or remove it.")
    if isinstance(answer, str) and choices.count(answer) == 1:
        answer = choices.index(answer)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise DataError(
            f"{location}: answer is {answer!r}, and must be the index of a choice, 0 to {len(choices) - 1}, or its "
            "text. Correct the row, or remove it."
        )
    return Question(record["question"], choices, answer)


def split_tokens(tokenizer: Any, start: Sequence[int], context: str, continuation: str) -> Passage:
    """Returns the tokens of a context and of its continuation, which is scored.

    They are tokenized together, and cut where the context alone would end; a space at its end belongs to the
    continuation, as in EleutherAI's lm-evaluation-harness. ``start`` comes before them.
    """
    stripped = context.rstrip()
    whole = tokenizers.encode(tokenizer, context + continuation)
    length = len(tokenizers.encode(tokenizer, stripped)) if stripped else 0
    return Passage([*start, *whole], max(len(start) + length, 1))


def passages_of(question: Question, form: PromptForm, tokenizer: Any, start: Sequence[int]) -> List[Passage]:
    """Returns a passage for each choice: after the question and a space, or after a prompt if ``form`` makes one."""
    if form.is_text:
        return [split_tokens(tokenizer, start, question.text, f" {choice}") for choice in question.choices]
    prompt = form.tokens(question.text)
    return [Passage([*prompt, *tokenizers.encode(tokenizer, choice)], len(prompt)) for choice in question.choices]


def measure_choices(
    engine: Engine, questions: Sequence[Question], form: PromptForm, models: Sequence[Model], source: str, seed: int
) -> List[Measure]:
    """Returns two accuracies of the models: by the log-probability of each choice, and by that per character.

    Both are as in EleutherAI's lm-evaluation-harness (acc, acc_norm); the first of equal choices wins.
    """
    start = start_tokens(engine.tokenizer)
    passages = [passage for question in questions for passage in passages_of(question, form, engine.tokenizer, start)]
    scores = score(engine, passages, models)
    right = {model: _right(questions, scores[model]) for model in models}
    weights = np.ones(len(questions))
    measures = []
    for kind, name in enumerate(("accuracy", "accuracy by length")):
        amounts = {model: right[model][:, kind] for model in models}
        measures.append(measure(name, source, False, amounts, weights, seed=seed))
    return measures


def _right(questions: Sequence[Question], scores: Sequence[Scores]) -> np.ndarray:
    """Returns float64 [questions, 2], 1 where the choice is right: by log-probability, and relative to its length."""
    sums = [float(one.logprobs.sum()) for one in scores]
    right = np.zeros((len(questions), 2))
    first = 0
    for place, question in enumerate(questions):
        logprobs = np.array(sums[first : first + len(question.choices)])
        lengths = np.array([len(choice) for choice in question.choices])
        right[place] = logprobs.argmax() == question.answer, (logprobs / lengths).argmax() == question.answer
        first += len(question.choices)
    return right


@dataclasses.dataclass(frozen=True)
class Task:
    """A question and its right answer."""

    location: str
    question: str
    answer: str


def exact(text: str) -> Optional[str]:
    """Returns a text without surrounding space: answers must be equal."""
    return text.strip()


def number(text: str) -> Optional[str]:
    """Returns the number after the first ####, without commas and signs of currency, or None if there is none."""
    found = _NUMBER.search(text)
    if found is None:
        return None
    digits = found.group(1).replace(",", "").replace("$", "")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


# The part of an answer that must be equal, by the name of the rule.
RULES: Dict[str, Callable[[str], Optional[str]]] = {"exact": exact, "number": number}


def read_tasks(path: str, rule: str) -> List[Task]:
    """Returns the rows of a file with the columns question and answer, or instruction and output.

    Raises DataError if the file cannot be read, or an answer has nothing for ``rule``, a key of RULES, to compare.
    """
    return [_task(row.location, row.record, rule) for row in read_inputs(path, _ANSWER_LAYOUT)[0].rows]


def _task(location: str, record: Any, rule: str) -> Task:
    fields = [record.get(name) if isinstance(record, dict) else None for name in _ANSWER_LAYOUT.fields]
    for name, text in zip(_ANSWER_LAYOUT.fields, fields):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{location} has no text in its column '{name}'. Correct the row, or remove it.")
    if RULES[rule](fields[1]) is None:
        raise DataError(f"{location}: the answer has no number after ####. Correct the row, or choose --rule exact.")
    return Task(location, *fields)


def measure_answers(
    engine: Engine,
    tasks: Sequence[Task],
    form: PromptForm,
    sampling: Sampling,
    rule: str,
    models: Sequence[Model],
    source: str,
    seed: int,
) -> Measure:
    """Returns how often each model's answers are right by a rule; ``sampling`` says how they are sampled.

    Raises RequestError if a question leaves no room for an answer.
    """
    requests = []
    for task in tasks:
        tokens = form.tokens(task.question)
        room = engine.seq_length - len(tokens)
        if room < 1:
            raise RequestError(
                f"{task.location}: the question has {len(tokens)} tokens, but the model takes {engine.seq_length}, the "
                "answer included. Shorten it, or raise --seq-length."
            )
        ends = dataclasses.replace(
            sampling, max_tokens=min(sampling.max_tokens, room), stop_tokens=tuple(form.prompt.ends)
        )
        requests += [(tokens, ends, model) for model in models]
    right: Dict[Model, List[float]] = {model: [] for model in models}
    compared = RULES[rule]
    expected = [compared(task.answer) for task in tasks for _ in models]
    for (request, text), answer in zip(progress(ask(engine, requests), "answering", len(requests)), expected):
        right[request.adapter].append(float(compared(text) == answer))
    amounts = {model: np.array(values) for model, values in right.items()}
    return measure(f"right answers ({rule})", source, False, amounts, np.ones(len(tasks)), seed=seed)
