"""Multiple choice: the model takes the answer that it finds likeliest, as it stands or for its length."""

import dataclasses
from typing import Any, List, Sequence

import numpy as np

from mindlora.core.errors import DataError
from mindlora.data import tokenizers
from mindlora.data.sources import Layout, read_inputs
from mindlora.serving.chat_prompt import PromptForm
from mindlora.serving.engine import Engine
from mindlora.serving.evaluation.scoring import Model, Passage, Scores, score
from mindlora.serving.evaluation.statistics import Measure, measure
from mindlora.serving.evaluation.texts import start_tokens

_LAYOUT = Layout(("question", "choices", "answer"))


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its choices, two or more, and the index of the right one."""

    text: str
    choices: List[str]
    answer: int


def read_questions(path: str) -> List[Question]:
    """Returns the rows of a file with the columns question, choices (a list of texts) and answer (an index or a text).

    Raises DataError if the file cannot be read, or a row holds something else.
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
    """Returns a context and its continuation as tokens, of which those of the continuation are scored.

    They are tokenized together, and cut where the context alone would end; a space at its end belongs to what follows,
    as in EleutherAI's lm-evaluation-harness. ``start`` comes before them.
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
    """Returns two accuracies of the models: by the log-probability of each choice, and by that for each character.

    Both are as in EleutherAI's lm-evaluation-harness (acc, acc_norm); of equal choices the first one is taken.
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
    """Returns float64 [questions, 2], 1 where the choice is right: as it stands, and for its length."""
    sums = [float(one.logprobs.sum()) for one in scores]
    right = np.zeros((len(questions), 2))
    first = 0
    for place, question in enumerate(questions):
        logprobs = np.array(sums[first : first + len(question.choices)])
        lengths = np.array([len(choice) for choice in question.choices])
        right[place] = logprobs.argmax() == question.answer, (logprobs / lengths).argmax() == question.answer
        first += len(question.choices)
    return right
