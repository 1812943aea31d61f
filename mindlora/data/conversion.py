"""Common parts of all conversions to MindRecord: kinds of examples, tokens, rows of two columns, and the report.

Every row has two columns, ``input_ids`` and ``labels``, int32 [seq_length + 1] each. In training, LlamaForCausalLM
drops the last input id and the first label, so that seq_length positions remain and position i predicts token i + 1; a
label is therefore at the position of its own token. Labels equal to ignore_token_id do not count in the loss: those of
prompts and padding. A YAML for such data has ``train_dataset.data_loader.type: MindDataset`` with ``dataset_dir``
naming the file, ``input_columns: ["input_ids", "labels"]``, and ``train_dataset_task.type:
CausalLanguageModelDataset``. Name the file, not its folder, because MindFormers reads every MindRecord in a folder.
MindFormers' own evaluation (``do_eval``) drops no token, so its rows need seq_length tokens: convert with one less.
"""

import abc
import dataclasses
import sys
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple, TypeVar

import numpy as np
from tqdm import tqdm

from mindlora.core.errors import DataError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.core.text import first_ten
from mindlora.data import tokenizers
from mindlora.data.sources import Layout

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class DataReport:
    """A report on the rows that a conversion read, skipped and wrote.

    Attributes:
        output (str): The MindRecord.
        tokens (int): Tokens in all rows, padding not counted.
        trained_tokens (int): Labels that count in the loss.
        longest (int): Tokens in the longest example.
        seq_length (int): seq_length of the model; a row has one token more.
        vocab_size (int): The smallest vocab_size that the model may have.
        notes (list of str): Further notes for the user.
        held_out (str or None): The MindRecord of the held-out rows.
        skipped (dict): Reason -> locations of the rows skipped for it, such as {"no \\"output\\"": ["line 12"]}.
        truncated (list of str): Locations of the rows that were cut.
        cut_at (str): Where the rows were cut: at their "end" or "beginning".
        inputs (dict): Input -> [rows that were used, rows that could be used].
        packed_boundary (int or None): Token that begins each example in a row; None if a row holds one example.
        statistics (LengthStatistics or None): Statistics of the examples' lengths, if requested.
    """

    output: str
    rows: int
    tokens: int
    trained_tokens: int
    longest: int
    seq_length: int
    vocab_size: int
    pad_token_id: int
    ignore_token_id: int
    notes: List[str]
    held_out: Optional[str] = None
    held_out_rows: int = 0
    skipped: Dict[str, List[str]] = dataclasses.field(default_factory=dict)
    truncated: List[str] = dataclasses.field(default_factory=list)
    cut_at: str = "end"
    inputs: Dict[str, List[int]] = dataclasses.field(default_factory=dict)
    packed_boundary: Optional[int] = None
    statistics: Optional[object] = None

    def __str__(self):
        kind = "rows" if self.packed_boundary is None else "packed rows"
        lines = [f"{self.output}: {self.rows} {kind} of {self.seq_length + 1} tokens"]
        if self.held_out:
            lines.append(f"{self.held_out}: {self.held_out_rows} {kind}, held out")
        if len(self.inputs) > 1:
            lines += [f"{path}: {used} of {usable} usable rows" for path, (used, usable) in self.inputs.items()]
        lines += [f"skipped, {line}" for line in describe_skipped(self.skipped)]
        if self.truncated:
            lines.append(f"cut at the {self.cut_at}: {len(self.truncated)} ({first_ten(self.truncated)})")
        lines.append(
            f"{self.tokens} tokens, {self.trained_tokens} of them in the loss; the longest example has {self.longest}"
        )
        lines += [str(self.statistics)] if self.statistics else []
        lines += [f"note: {note}" for note in self.notes]
        lines.append(
            f"model_config: seq_length: {self.seq_length}, vocab_size: {self.vocab_size} or more, "
            f"pad_token_id: {self.pad_token_id}, ignore_token_id: {self.ignore_token_id}"
        )
        if self.packed_boundary is not None:
            lines.append(f"runner_wrapper: packed_boundary: {self.packed_boundary} (mindlora-run sets it itself)")
        return "\n".join(lines)


class Encoded(NamedTuple):
    """One example: its tokens, int32 [n], and which of them count in the loss, bool [n]."""

    tokens: np.ndarray
    learned: np.ndarray

    @property
    def parts(self) -> "Tuple[Encoded, ...]":
        """The example's sequences of tokens: just itself."""
        return (self,)

    def columns(
        self, seq_length: int, pad_token_id: int, ignore_token_id: int = IGNORE_TOKEN_ID
    ) -> Dict[str, np.ndarray]:
        """Returns input_ids and labels, int32 [seq_length + 1] each, padded at the end.

        The example has at most seq_length + 1 tokens. ``ignore_token_id`` labels the padding and what is not learned.
        """
        input_ids = np.full(seq_length + 1, pad_token_id, np.int32)
        labels = np.full(seq_length + 1, ignore_token_id, np.int32)
        input_ids[: len(self.tokens)] = self.tokens
        labels[: len(self.tokens)][self.learned] = self.tokens[self.learned]
        return {"input_ids": input_ids, "labels": labels}


class UnusableRow(Exception):
    """An error that says why a row cannot be used, in words that group rows with the same problem."""


class Examples(abc.ABC):
    """Base class for kinds of examples, which turn a row into tokens; ``cut_at`` is the end that ``cut`` cuts off.

    ``chat_template`` is saved with a tokenizer trained on the examples.
    """

    layout: Layout
    chat_template: Optional[str] = None
    cut_at = "end"

    @abc.abstractmethod
    def parse(self, record: Any) -> Any:
        """Returns the record in the form that ``text`` and ``encode`` take; raises UnusableRow if it has a problem."""

    @abc.abstractmethod
    def text(self, parsed: Any) -> str:
        """Returns the text for training a tokenizer."""

    def prepare(self, tokenizer: Any) -> None:  # noqa: B027 (most kinds have nothing to prepare)
        """Prepares for the tokenizer that ``encode`` will use; raises TokenizerError if it cannot be used."""

    def notes(self) -> List[str]:
        """Returns notes for the user once all rows have been encoded."""
        return []

    @abc.abstractmethod
    def encode(self, parsed: Any, tokenizer: Any) -> Encoded:
        """Returns the tokens of a parsed record; raises UnusableRow if they show a problem."""

    def length(self, encoded: Encoded) -> int:
        """Returns the number of tokens that an example takes in a row."""
        return len(encoded.tokens)

    @abc.abstractmethod
    def cut(self, encoded: Encoded, limit: int) -> Encoded:
        """Returns at most ``limit`` tokens; raises UnusableRow if nothing to learn would remain."""

    def complete(self, encoded: List[Encoded]) -> List[Encoded]:
        """Returns all encoded examples of an input, completed with what they need from each other."""
        return encoded


class RowFormat(NamedTuple):
    """The format of rows: turns examples into columns."""

    tokenizer: Any
    seq_length: int
    ignore_token_id: int

    def columns(self, examples: Iterable[Encoded]) -> Iterator[Dict[str, np.ndarray]]:
        """Turns examples of every kind into rows; here, each example becomes a row.

        Yields the columns of one row at a time, because padding can take many times the memory of the tokens.
        """
        pad = tokenizers.special_ids(self.tokenizer).pad
        return (example.columns(self.seq_length, pad, self.ignore_token_id) for example in examples)

    def report(self, encoded: List[Encoded], output: str, rows: int, notes: Iterable[str], **more: Any) -> DataReport:
        """Returns the report on ``encoded``, with ``rows`` rows in ``output``; ``more`` holds its other fields."""
        special = tokenizers.special_ids(self.tokenizer)
        parts = all_parts(encoded)
        return DataReport(
            output=output,
            rows=rows,
            tokens=sum(len(part.tokens) for part in parts),
            # No position predicts the first token of a row.
            trained_tokens=sum(int(part.learned[1:].sum()) for part in parts),
            longest=max(len(part.tokens) for part in parts),
            seq_length=self.seq_length,
            vocab_size=tokenizers.vocabulary_size(self.tokenizer),
            pad_token_id=special.pad,
            ignore_token_id=self.ignore_token_id,
            notes=[*notes, *special.notes],
            **more,
        )


def all_parts(examples: Iterable[Encoded]) -> List[Encoded]:
    """Returns all token sequences of the examples."""
    return [part for example in examples for part in example.parts]


def check_seq_length(seq_length: int) -> None:
    """Raises DataError unless ``seq_length`` is a whole number of at least 1."""
    if not isinstance(seq_length, int) or seq_length < 1:
        raise DataError(f"seq_length is {seq_length!r}: it must be the model's, a whole number of at least 1.")


def describe_skipped(skipped: Dict[str, List[str]]) -> List[str]:
    """Returns one line for each reason, with the number of rows and the first few locations."""
    return [f"{reason}: {len(locations)} ({first_ten(locations)})" for reason, locations in skipped.items()]


def progress(items: Iterable[T], label: str, total: Optional[int] = None) -> Iterable[T]:
    """Iterates over ``items``, with a bar if stderr is a terminal and it takes more than a second.

    ``total`` is the number of items, if ``items`` has no length.
    """
    return tqdm(items, desc=label, total=total, delay=1, leave=False, disable=not sys.stderr.isatty())
