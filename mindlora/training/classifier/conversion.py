"""Conversion of labeled texts and labeled words to MindRecord: the rows that a classifier learns from.

A row has the columns of all conversions, ``input_ids`` and ``labels``, int32 [seq_length + 1] each. As with tokens, a
label stands one place after the position that predicts it: a text's label after its last token, a word's label after
its first token. So a text has at most seq_length tokens.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import DataError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.core.json_files import write_json
from mindlora.data import tokenizers
from mindlora.data.conversion import DataReport, Examples, UnusableRow
from mindlora.data.pipeline import Settings, convert_examples
from mindlora.data.sources import Layout

FIELDS = ("text", "label", "tokens", "tags")
LAYOUT = Layout(FIELDS, defaults=dict.fromkeys(FIELDS), aliases={"text": "sentence", "tags": "ner_tags"})
_NO_LABEL = -1
Label = Union[int, str]


def convert_labels(
    inputs: Union[str, Sequence[str]],
    output_path: str,
    tokenizer: Any,
    seq_length: int,
    *,
    label_names: Optional[Sequence[str]] = None,
    **settings: Any,
) -> DataReport:
    """Writes labeled texts, or lists of tagged words, as MindRecord, and the names of the labels beside it.

    A record is {"text", "label"} or {"tokens", "tags"}; labels are names, or numbers from 0. X-labels.json lists their
    names in the order of their numbers. With ``truncate``, the end of a text or list of words that is too long is cut
    off.

    Args:
        inputs (str or sequence of str): As for convert_alpaca.
        output_path, tokenizer, seq_length, **settings: As for convert_alpaca; ``pack`` is not possible.
        label_names (sequence of str, optional): The labels in the order of their numbers. Default: None, all labels
            that occur, sorted.

    Returns:
        DataReport.

    Raises:
        DataError: As for convert_alpaca, or the rows are of both kinds, or names and numbers are mixed.
        TokenizerError: As for convert_alpaca.
    """
    options = Settings(seq_length, **settings)
    if options.pack:
        raise DataError("Labeled texts are not packed: leave pack out (--pack).")
    examples = LabelExamples(seq_length, label_names)
    report = convert_examples(examples, inputs, output_path, tokenizer, options)
    with atomic.replace_file(labels_name(output_path)) as path:
        write_json(path, examples.names)
    return report


def labels_name(output_path: str) -> str:
    """Returns the path of the file with the labels' names."""
    return output_path[: -len(".mindrecord")] + "-labels.json"


class Labeled(NamedTuple):
    """Tokens, int32 [n], and each position's label number or -1, int32 [n]."""

    tokens: np.ndarray
    labels: np.ndarray

    @property
    def parts(self) -> "Tuple[Labeled, ...]":
        """The example's sequences of tokens: just itself."""
        return (self,)

    @property
    def learned(self) -> np.ndarray:
        """Returns which places of a row hold a label."""
        return np.append(False, self.labels != _NO_LABEL)

    def columns(
        self, seq_length: int, pad_token_id: int, ignore_token_id: int = IGNORE_TOKEN_ID
    ) -> Dict[str, np.ndarray]:
        """Returns the columns of the example's row."""
        input_ids = np.full(seq_length + 1, pad_token_id, np.int32)
        labels = np.full(seq_length + 1, ignore_token_id, np.int32)
        input_ids[: len(self.tokens)] = self.tokens
        labels[1 : len(self.labels) + 1][self.learned[1:]] = self.labels[self.learned[1:]]
        return {"input_ids": input_ids, "labels": labels}


class Record(NamedTuple):
    """A text with a label, or words with a label each; labels may be absent where they are not needed."""

    words: List[str]
    labels: List[Label]
    is_text: bool


class Places(NamedTuple):
    """The tokens of a text or of words, and the index of the token at which each label belongs."""

    tokens: List[int]
    places: List[int]


class LabelExamples(Examples):
    """Labeled texts, or labeled words; ``names`` holds the labels' names once all rows have been read."""

    layout = LAYOUT

    def __init__(self, seq_length: int, names: Optional[Sequence[str]] = None):
        self.limit = seq_length
        self.names: List[str] = list(names or [])
        self.is_given = names is not None
        self.seen: Dict[Label, None] = {}
        self.are_texts: Optional[bool] = None

    def parse(self, record: Any) -> Record:
        """See Examples."""
        read = read_record(record)
        if self.are_texts not in (None, read.is_text):
            raise UnusableRow("a labeled text among labeled words" if read.is_text else "labeled words among texts")
        unknown = [label for label in read.labels if self.is_given and not self._is_known(label)]
        if unknown:
            raise UnusableRow(f"the label {unknown[0]!r}, which is not among the names given")
        self.are_texts = read.is_text
        self.seen.update(dict.fromkeys(read.labels))
        return read

    def _is_known(self, label):
        return label in self.names if isinstance(label, str) else label < len(self.names)

    def text(self, parsed: Record) -> str:
        """See Examples."""
        return " ".join(parsed.words)

    def prepare(self, tokenizer: Any) -> None:
        """See Examples."""
        if self.is_given:
            return
        kinds = {type(label) for label in self.seen}
        if len(kinds) > 1:
            named = next(label for label in self.seen if isinstance(label, str))
            raise DataError(f"Some labels are names, such as {named!r}, and some are numbers: write all as names.")
        if kinds == {int}:
            self.names = [str(number) for number in range(max(self.seen) + 1)]
        else:
            self.names = sorted(self.seen)

    def encode(self, parsed: Record, tokenizer: Any) -> Labeled:
        """See Examples."""
        tokens, places = encode_record(parsed, tokenizer)
        labels = np.full(len(tokens), _NO_LABEL, np.int32)
        for place, label in zip(places, parsed.labels):
            labels[place] = label if isinstance(label, int) else self.names.index(label)
        return Labeled(np.array(tokens, np.int32), labels)

    def length(self, encoded: Labeled) -> int:
        """See Examples: the last token needs a place behind it for its label."""
        return len(encoded.tokens) + 1

    def cut(self, encoded: Labeled, limit: int) -> Labeled:
        """Cuts off the end; a text's label stays at its last token."""
        labels = encoded.labels[: self.limit].copy()
        if self.are_texts:
            labels[-1] = encoded.labels[-1]
        if (labels == _NO_LABEL).all():
            raise UnusableRow(f"words of which none begins within {self.limit} tokens")
        return Labeled(encoded.tokens[: self.limit], labels)

    def notes(self) -> List[str]:
        """See Examples."""
        shown = ", ".join(f"{number} {name}" for number, name in enumerate(self.names[:10]))
        more = ", ..." if len(self.names) > 10 else ""
        return [f"model_config: num_labels: {len(self.names)} ({shown}{more})"]


def encode_record(parsed: Record, tokenizer: Any) -> Places:
    """Encodes a text, labeled at its last token, or words, joined by spaces and each labeled at its first token.

    Raises UnusableRow for a word or a text without tokens.
    """
    special = tokenizers.special_ids(tokenizer)
    tokens = [] if special.bos is None else [special.bos]
    places = []
    for number, word in enumerate(parsed.words):
        pieces = tokenizers.encode(tokenizer, f" {word}" if number else word)
        if not pieces:
            raise UnusableRow("a word without tokens" if not parsed.is_text else "a text without tokens")
        places.append(len(tokens) + (len(pieces) - 1 if parsed.is_text else 0))
        tokens += pieces
    return Places(tokens, places)


def read_record(record: Any, needs_labels: bool = True) -> Record:
    """Returns the text or words of a record; raises UnusableRow if it holds neither a labeled text nor labeled words.

    Unless ``needs_labels``, the label field may be missing.
    """
    if not isinstance(record, dict):
        raise UnusableRow("not an object")
    text, words = record.get("text"), record.get("tokens")
    if (text is None) == (words is None):
        raise UnusableRow('neither "text" and "label" nor "tokens" and "tags"')
    if words is None:
        words, labels = [text], [record.get("label")]
    else:
        labels = record.get("tags")
        if labels is None and not needs_labels and isinstance(words, list):
            labels = [None] * len(words)
        if not isinstance(words, list) or not isinstance(labels, list) or len(words) != len(labels) or not words:
            raise UnusableRow('"tokens" and "tags" are not lists of one length')
    if not all(isinstance(word, str) and word.strip() for word in words):
        raise UnusableRow("an empty text" if text is not None else "a word that is empty or no text")
    if not needs_labels and all(label is None for label in labels):
        return Record(words, [], text is not None)
    for label in labels:
        is_number = isinstance(label, int) and not isinstance(label, bool) and label >= 0
        if not is_number and not (isinstance(label, str) and label):
            raise UnusableRow(f"a label that is neither a name nor a number from 0: {label!r}")
    return Record(words, labels, text is not None)
