"""The tokenizer of a conversion: loaded or trained, and held against the vocabulary of the base."""

import dataclasses
import os
from typing import Any, Iterable, Iterator, List, Optional, Sequence, Tuple

from mindlora.base.reader import BaseCheckpoint
from mindlora.data import tokenizers
from mindlora.data.files import bare_name, pieces, read_text
from mindlora.errors import DataError

_ROWS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".mindrecord")
_ONLY_FROM_SCRATCH = "a new tokenizer fits only a base that was trained from scratch with it"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What a conversion is told of its tokenizer.

    Attributes:
        tokenizer (str or tokenizer): A path for load_tokenizer, or a tokenizer that it returned.
        train_size (int, optional): Train a tokenizer of this size on what is converted (see train_tokenizer), to be
            saved at ``tokenizer``, which must then be a path.
        train_texts (sequence of str): Files of plain text to train it on as well.
        base (str, optional): The base that is trained on the data: a folder, a .safetensors or a .ckpt file. Its
            vocabulary is compared with the tokenizer's.
    """

    tokenizer: Any
    train_size: Optional[int] = None
    train_texts: Sequence[str] = ()
    base: Optional[str] = None

    def check(self, overwrite: bool) -> None:
        """Raises DataError or TokenizerError if a setting is wrong, a file is missing, or the tokenizer may not be
        written where it should be."""
        if self.base is not None and not os.path.exists(self.base):
            raise DataError(f"base: {self.base} does not exist. Name the checkpoint that is trained on the data.")
        if self.train_size is None:
            if self.train_texts:
                raise DataError(
                    "train_texts names texts for a new tokenizer, and its size is missing: set train_vocab_size "
                    "(--train-tokenizer VOCAB_SIZE)."
                )
            return
        if not isinstance(self.tokenizer, str):
            raise DataError(
                "train_vocab_size asks for a new tokenizer: give the path to save it at, not a loaded tokenizer."
            )
        for path in self.train_texts:
            if bare_name(path).endswith(_ROWS):
                raise DataError(
                    f"train_texts: {path} holds rows, and a tokenizer learns from plain text here: convert it "
                    "with --input, or write its texts to a .txt file."
                )
            if not os.path.isfile(path):
                raise DataError(f"train_texts: there is no file {path}.")
        tokenizers.check_tokenizer_output(self.tokenizer, overwrite)

    def load(self, texts: Iterable[str], chat_template: Optional[str] = None) -> Tuple[Any, List[str]]:
        """Returns the tokenizer, and what the user should know of it.

        Args:
            texts (iterable of str): What is converted, to train a tokenizer on.
            chat_template (str, optional): For a tokenizer that is trained. Default: None.

        Raises:
            DataError, TokenizerError: A file cannot be read, or the tokenizer not be loaded or trained.
            CheckpointError: The base cannot be read.
        """
        if self.train_size is None:
            loaded = tokenizers.load_tokenizer(self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer
            return loaded, self._of_the_base(loaded)
        trained = tokenizers.fit_tokenizer(self._all_texts(texts), self.train_size)
        trained.chat_template = chat_template
        learned_from = ", ".join(["this data", *self.train_texts])
        notes = [f"{self.tokenizer}: a tokenizer of {len(trained)} tokens, trained on {learned_from}"]
        if len(trained) < self.train_size:
            notes.append(
                f"it is smaller than the {self.train_size} tokens asked for, because no other pair occurs twice"
            )
        return trained, notes + self._of_the_base(trained)

    def save(self, loaded: Any) -> None:
        """Saves the tokenizer that ``load`` returned, if it was trained."""
        if self.train_size is not None:
            tokenizers.save_tokenizer(loaded, self.tokenizer)

    def _all_texts(self, texts) -> Iterator[str]:
        yield from texts
        for path in self.train_texts:
            yield from pieces(read_text(path))

    def _of_the_base(self, loaded) -> List[str]:
        """Returns a warning if the base was trained with another vocabulary, or if that is not known of a new one."""
        new = self.train_size is not None
        if self.base is None:
            return [_ONLY_FROM_SCRATCH + " (--base compares it with the base's)"] if new else []
        own = _tokenizer_beside(self.base)
        if own is not None:
            known, vocabulary = tokenizers.load_tokenizer(own).get_vocab(), loaded.get_vocab()
            differing = sum(known.get(token) != number for token, number in vocabulary.items())
            if not differing:
                return []
            found = f"{differing} of {len(vocabulary)} tokens have another id, or none, in the tokenizer beside it"
            return [_another_vocabulary(self.base, found, f"Use {own}")]
        rows, size = _embedding_rows(self.base), tokenizers.vocabulary_size(loaded)
        if rows is not None and (rows < size or new and rows != size):
            found = f"its embedding has {rows} rows, and the tokenizer {size} ids"
            return [_another_vocabulary(self.base, found, "Use its own tokenizer")]
        return [f"no tokenizer is beside {self.base}, so only sizes were compared. {_ONLY_FROM_SCRATCH}"] if new else []


def _another_vocabulary(base, found, way_out) -> str:
    return (
        f"WARNING: {base} was trained with another vocabulary: {found}. Its embeddings would mean other tokens. "
        f"{way_out}, or train a base from scratch with this one"
    )


def _tokenizer_beside(base: str) -> Optional[str]:
    """Returns the tokenizer in the folder of a checkpoint."""
    folder = base if os.path.isdir(base) else os.path.dirname(os.path.abspath(base))
    paths = (os.path.join(folder, name) for name in ("tokenizer.json", "tokenizer.model"))
    return next(filter(os.path.isfile, paths), None)


def _embedding_rows(base: str) -> Optional[int]:
    """Returns the number of ids that a checkpoint has embeddings for; None if it has no embedding."""
    with BaseCheckpoint(base) as checkpoint:
        table = checkpoint.tensors.get(checkpoint.architecture.embedding_table(checkpoint.world))
        return table.shape[0] if table else None
