"""What a conversion of examples is told, whatever their kind, and what can be checked before anything is read."""

import dataclasses
from typing import Any, Mapping, Optional, Sequence, Union

from mindlora.data import histogram
from mindlora.data.conversion import IGNORE_TOKEN_ID, check_seq_length
from mindlora.data.mindrecord import check_mindrecord_output
from mindlora.data.vocabulary import Vocabulary
from mindlora.errors import DataError


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a conversion of examples is told, whatever their kind.

    Attributes:
        seq_length (int): seq_length of the model; an example has at most one token more.
        columns (sequence of dict): Field -> its column in the input; one for all inputs, or one for each. None: the
            columns have the names of the fields.
        split (str, optional): Which split to read of a dataset that Hugging Face's library saved.
        weights (sequence of float, optional): One for each input (see mindlora.data.mixing.drawn_counts). None: all
            rows of all inputs.
        holdout (float): Share of the usable examples to write to X-heldout.mindrecord instead, drawn by ``seed``.
        seed (int): What is drawn depends on it and on the number of examples alone. It also orders packed rows.
        truncate (bool): Cut what is too long (see Examples.cut) instead of skipping it.
        strict (bool): Fail if any row cannot be used.
        train_vocab_size (int, optional): Train a tokenizer of this size on the usable rows (see train_tokenizer) and
            save it at ``tokenizer``, which must then be a path.
        train_texts (sequence of str): Files of plain text to train it on besides the rows.
        base (str, optional): The base that is trained on the rows, to compare vocabularies (see Vocabulary).
        ignore_token_id (int): ignore_token_id of the model.
        pack (bool): Put many examples into a row (see mindlora.data.packing).
        actual_seq_len (bool): Add the column actual_seq_len to packed rows, for flash attention on Ascend.
        stats (bool or str): Report on the lengths of the examples; a path also draws their histogram, as a PNG.
        overwrite (bool): Replace what exists at the output paths.
    """

    seq_length: int
    columns: Sequence[Mapping[str, str]] = ()
    split: Optional[str] = None
    weights: Optional[Sequence[float]] = None
    holdout: float = 0.0
    seed: int = 0
    truncate: bool = False
    strict: bool = False
    train_vocab_size: Optional[int] = None
    train_texts: Sequence[str] = ()
    base: Optional[str] = None
    ignore_token_id: int = IGNORE_TOKEN_ID
    pack: bool = False
    actual_seq_len: bool = False
    stats: Union[bool, str] = False
    overwrite: bool = False

    def vocabulary(self, tokenizer: Any) -> Vocabulary:
        """Returns what these settings say of a tokenizer.

        Args:
            tokenizer (str or tokenizer): As of Vocabulary.
        """
        return Vocabulary(tokenizer, self.train_vocab_size, self.train_texts, self.base)

    def check(self) -> None:
        """Raises DataError if a value cannot be meant."""
        check_seq_length(self.seq_length)
        if not 0 <= self.holdout < 1:
            raise DataError(f"holdout is {self.holdout}: it must be a share of the rows, at least 0 and below 1.")
        if not isinstance(self.seed, int) or self.seed < 0:
            raise DataError(f"seed is {self.seed!r}: it must be a whole number of at least 0.")
        if self.actual_seq_len and not self.pack:
            raise DataError("actual_seq_len is set and pack is not: it says where the examples of a packed row end.")
        if isinstance(self.stats, str):
            histogram.check_output(self.stats)


def check_arguments(output_path: str, tokenizer: Any, settings: Settings) -> None:
    """Raises DataError or TokenizerError if a setting is wrong or something must not be written where it should be."""
    settings.check()
    for path in [output_path] + ([held_out_name(output_path)] if settings.holdout else []):
        check_mindrecord_output(path, settings.overwrite)
    settings.vocabulary(tokenizer).check(settings.overwrite)


def held_out_name(output_path: str) -> str:
    """Returns where the examples that are held out go."""
    return output_path[: -len(".mindrecord")] + "-heldout.mindrecord"
