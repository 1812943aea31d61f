"""Labels and scores that classifiers and reward models assign to texts, and how many of the labels are right."""

import dataclasses
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import DataError, RequestError
from mindlora.core.text import first_ten
from mindlora.data.conversion import UnusableRow, progress
from mindlora.data.sources import read_inputs
from mindlora.serving.engine import Engine
from mindlora.serving.evaluation.texts import ask
from mindlora.serving.request import Reading, Sampling
from mindlora.serving.runner import vectors_of
from mindlora.serving.score_head import ScoreHead, probabilities_of
from mindlora.training.classifier.conversion import LAYOUT, Label, Record, encode_record, read_record
from mindlora.training.classifier.labels import label_measures

Probabilities = Dict[str, float]


class Text(NamedTuple):
    """A text to be judged, and the location where it was read, for messages."""

    location: str
    record: Record


@dataclasses.dataclass(frozen=True)
class LabeledWord:
    """A classifier's label for a word."""

    word: str
    label: str
    probabilities: Probabilities


@dataclasses.dataclass(frozen=True)
class Judgment:
    """One adapter's judgment of one text.

    Attributes:
        label, probabilities: For a classifier of texts: the most likely label, and the probability of each label by
            name.
        words (tuple of LabeledWord or None): For a classifier of tokens: its labels.
        score (float or None): For a reward model: its score.
    """

    adapter: str
    text: str
    label: Optional[str] = None
    probabilities: Optional[Probabilities] = None
    words: Optional[Tuple[LabeledWord, ...]] = None
    score: Optional[float] = None

    @property
    def row(self) -> Dict[str, Any]:
        """Returns the judgment as a row for JSON."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class LabelMeasures:
    """Quality of a classifier's labels where the true ones are known: label_measures over ``labels`` labels."""

    adapter: str
    labels: int
    accuracy: float
    f1: float


class Question(NamedTuple):
    """A text in the form that an adapter gets.

    Attributes:
        record (Record): The text's words, or the complete text.
        tokens (list of int): The text's tokens.
        places (list of int): Index of the token at which each word is labeled.
        actual (list of int): Numbers of the text's true labels; empty if it has none.
    """

    adapter: str
    record: Record
    tokens: List[int]
    places: List[int]
    actual: List[int]


def read_texts(path: str) -> List[Text]:
    """Returns the rows of a file with the columns of `mindlora data labels`; the label columns may be missing.

    Raises DataError if the file or one of its rows cannot be used.
    """
    return [text_of(f"{path}, {row.location}", row.record) for row in read_inputs(path, LAYOUT)[0].rows]


def text_of(location: str, record: Any) -> Text:
    """Returns the text of a record; raises DataError if it holds none."""
    try:
        return Text(location, read_record(record, needs_labels=False))
    except UnusableRow as error:
        raise DataError(f"{location}: {error}. Correct it, or leave it out.") from error


def questions_of(engine: Engine, texts: Sequence[Text], heads: Mapping[str, ScoreHead]) -> List[Question]:
    """Returns the questions for each adapter, text by text; the engine need not be started.

    Raises:
        DataError: A text is not of the kind that an adapter labels, or has a label that the adapter does not have.
        RequestError: A text is too long.
    """
    return [_question(engine, text, adapter, head) for text in texts for adapter, head in heads.items()]


def classify(
    engine: Engine, questions: Sequence[Question], heads: Mapping[str, ScoreHead]
) -> Tuple[List[Judgment], List[LabelMeasures]]:
    """Returns the adapters' judgments of texts, and each adapter's measures where texts have labels.

    Args:
        engine (Engine): Started.
        questions (sequence of Question): The result of questions_of.
        heads (mapping): Adapter -> its head, with the names of the labels.

    Raises:
        ServingError: The engine cannot compute the judgments.
    """
    requests = [(question.tokens, _sampling(heads[question.adapter]), question.adapter) for question in questions]
    judgments: List[Judgment] = []
    confusions = {adapter: np.zeros((len(head.weight),) * 2) for adapter, head in heads.items()}
    answered = progress(ask(engine, requests), "classifying", len(requests))
    for question, (request, _) in zip(questions, answered):
        head = heads[question.adapter]
        vectors = vectors_of(request)
        scores = vectors[question.places] if head.of_tokens else vectors
        judgments.append(_judgment(question, head, scores))
        for number, given in zip(question.actual, scores.argmax(-1)):
            confusions[question.adapter][number, given] += 1
    return judgments, list(_measures(confusions))


def _sampling(head: ScoreHead) -> Sampling:
    return Sampling(max_tokens=0, temperature=0.0, reading=Reading(scores=True, every=head.of_tokens))


def _question(engine: Engine, text: Text, adapter: str, head: ScoreHead) -> Question:
    record = text.record
    if record.is_text and head.of_tokens:
        if record.labels:
            raise DataError(f'{text.location} has one label, but {adapter} labels words: give "tokens" and "tags".')
        record = Record(record.words[0].split(), [], False)
    elif not record.is_text and not head.of_tokens:
        raise DataError(f'{text.location} has words, but {adapter} labels whole texts: give a "text".')
    try:
        tokens, places = encode_record(record, engine.tokenizer)
    except UnusableRow as error:
        raise DataError(f"{text.location}: {error}. Correct it, or leave it out.") from error
    if len(tokens) > engine.seq_length:
        raise RequestError(
            f"{text.location} has {len(tokens)} tokens, but the model takes {engine.seq_length}: make it shorter, or "
            "raise --seq-length."
        )
    if record.labels and head.is_reward:
        raise DataError(f"{text.location} has a label, but {adapter} gives one score and no labels: leave it out.")
    actual = [_number(label, text, adapter, head) for label in record.labels]
    return Question(adapter, record, tokens, places, actual)


def _number(label: Label, text: Text, adapter: str, head: ScoreHead) -> int:
    if isinstance(label, int) and label < len(head.names):
        return label
    if label in head.names:
        return head.names.index(str(label))
    raise DataError(
        f"{text.location} has the label {label!r}, but those of {adapter} are {first_ten(head.names)}: give their "
        "names with --labels."
    )


def _judgment(question: Question, head: ScoreHead, scores: np.ndarray) -> Judgment:
    adapter, words = question.adapter, question.record.words
    text = " ".join(words)
    if head.of_tokens:
        rows = [_labeled(head, row) for row in scores]
        return Judgment(adapter, text, words=tuple(LabeledWord(word, *row) for word, row in zip(words, rows)))
    if head.is_reward:
        return Judgment(adapter, text, score=float(scores[0, 0]))
    return Judgment(adapter, text, *_labeled(head, scores[0]))


def _labeled(head: ScoreHead, scores: np.ndarray) -> Tuple[str, Probabilities]:
    """Returns the most likely label, and the probability of each label."""
    probabilities = dict(zip(head.names, probabilities_of(scores).tolist()))
    return head.names[int(scores.argmax())], probabilities


def _measures(confusions: Mapping[str, np.ndarray]) -> Iterator[LabelMeasures]:
    for adapter, confusion in confusions.items():
        if confusion.any():
            yield LabelMeasures(adapter, int(confusion.sum()), **label_measures(confusion))
