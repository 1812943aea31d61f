"""Tokenizers: loads Hugging Face's and sentencepiece's, trains small ones, and compares them with a base's."""

import dataclasses
import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.core import atomic
from mindlora.core.errors import DataError, TokenizerError
from mindlora.core.git_lfs import refuse_pointer
from mindlora.core.json_files import parse_object
from mindlora.core.mindformers_version import require_mindformers
from mindlora.core.text import first_ten
from mindlora.data.sources import bare_name, pieces, read_text
from mindlora.files.base.reader import BaseCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Their positions in this tuple are their ids in a trained tokenizer: the ids of Llama 2, followed by <pad>.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256
_TRAINED_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
_ACCEPTED = (
    "Give Hugging Face's tokenizer.json with its tokenizer_config.json, a sentencepiece .model file, or a folder with "
    "tokenizer.json or tokenizer.model in it."
)
_ENDINGS_OF_ROWS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".mindrecord")
_ONLY_FROM_SCRATCH = "a new tokenizer fits only a base that was trained from scratch with it"


class SpecialIds(NamedTuple):
    """Ids of the special tokens.

    Attributes:
        bos (int or None): Beginning of sequence; None if the tokenizer, and so the rows, have no such token.
        eos (int): End of sequence.
        pad (int): Padding.
        notes (tuple of str): What replaces tokens that the tokenizer lacks.
    """

    bos: Optional[int]
    eos: int
    pad: int
    notes: Tuple[str, ...]


def load_tokenizer(path: str) -> Any:
    """Loads a tokenizer from local files; tokenizer.json is preferred if a folder holds both kinds.

    Args:
        path (str): A folder with tokenizer.json or tokenizer.model, or the file itself (a sentencepiece file may have
            any name that ends in .model). tokenizer_config.json beside tokenizer.json names the special tokens.

    Returns:
        A transformers.PreTrainedTokenizerFast, or for sentencepiece MindFormers' LlamaTokenizer.

    Raises:
        TokenizerError: There is no tokenizer at the path, or it cannot be loaded.
    """
    if os.path.isdir(path):
        names = sorted(os.listdir(path))
        file = next((name for name in ("tokenizer.json", "tokenizer.model") if name in names), None)
        if file is None:
            raise TokenizerError(f"No tokenizer in the folder {path}; it holds {first_ten(names)}. {_ACCEPTED}")
        path = os.path.join(path, file)
    elif not os.path.exists(path):
        raise TokenizerError(f"No tokenizer at {path}: there is no such file or folder. {_ACCEPTED}")
    refuse_pointer(path, TokenizerError)
    if os.path.basename(path) == "tokenizer.json":
        return _load_hugging_face(path)
    if path.endswith(".model"):
        return _load_sentencepiece(path)
    raise TokenizerError(f"{path} is not a tokenizer. {_ACCEPTED}")


def _load_hugging_face(path):
    from transformers import PreTrainedTokenizerFast

    folder = os.path.dirname(os.path.abspath(path))
    settings = _of_transformers_4(os.path.join(folder, "tokenizer_config.json"))
    try:
        # Not AutoTokenizer: tokenizer.json is complete, and needs no tokenizer class of its model.
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **settings)
    except Exception as error:  # The library raises a bare Exception for a tokenizer.json that it cannot parse.
        raise TokenizerError(
            f"Hugging Face's PreTrainedTokenizerFast cannot load {path} with the tokenizer_config.json beside it. "
            f"Copy both again, or save them with transformers 4. The reason: {_brief(error)}"
        ) from error


def _of_transformers_4(path: str) -> Dict[str, Any]:
    """Returns settings of transformers 5's tokenizer_config.json in the form that transformers 4 reads.

    These are special tokens without a role, which transformers 5 lists as extra_special_tokens.
    """
    if not os.path.isfile(path):
        return {}
    with open(path, "rb") as file:
        content = parse_object(file.read(), path, TokenizerError)
    extra = content.get("extra_special_tokens")
    if not isinstance(extra, list):
        return {}
    tokens = [*(content.get("additional_special_tokens") or []), *extra]
    texts = [token["content"] if isinstance(token, dict) and "content" in token else token for token in tokens]
    return {"extra_special_tokens": {}, "additional_special_tokens": list(dict.fromkeys(texts))}


def _load_sentencepiece(path):
    require_mindformers()
    # MindFormers is slow to import and writes a log folder, so it is imported only for sentencepiece files.
    from mindformers.models.llama.llama_tokenizer import LlamaTokenizer

    try:
        return LlamaTokenizer(vocab_file=path)
    except (RuntimeError, OSError) as error:
        raise TokenizerError(f"sentencepiece cannot load {path}: {_brief(error)}") from error


def encode(tokenizer: Any, text: str) -> List[int]:
    """Returns the ids of a text, without special tokens."""
    return tokenizer.encode(text, add_special_tokens=False, verbose=False)


def vocabulary_size(tokenizer: Any) -> int:
    """Returns the largest id of the tokenizer plus 1."""
    return max(tokenizer.get_vocab().values()) + 1


def special_ids(tokenizer: Any) -> SpecialIds:
    """Returns the ids that begin, end and pad a row. Without a pad token, eos pads, with ignored labels.

    Raises TokenizerError if there is no end-of-sequence token, without which a model could not learn to stop.
    """
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    if eos is None:
        raise TokenizerError(
            'The tokenizer names no end-of-sequence token: set "eos_token" in its tokenizer_config.json.'
        )
    notes = []
    if bos is None:
        notes.append("the tokenizer has no begin-of-sequence token: rows start with the prompt")
    if pad is None:
        notes.append(f"the tokenizer has no pad token: its end-of-sequence token (id {eos}) pads")
        pad = eos
    return SpecialIds(bos, eos, pad, tuple(notes))


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, path: str, *, overwrite: bool = False
) -> "PreTrainedTokenizerFast":
    """Trains a byte-level BPE tokenizer (Sennrich et al., 2016; on bytes, as in GPT-2) and saves it as a folder.

    The ids are 0 <unk> (never used: bytes cover every text), 1 <s>, 2 </s>, 3 <pad>, then the 256 bytes, then merges.
    With few texts, the tokenizer may be smaller than vocab_size, because training ends when no pair occurs twice.

    Args:
        texts (iterable of str): Training texts.
        vocab_size (int): Number of ids, the special ones included; at least 260.
        path (str): Folder to write; both transformers.AutoTokenizer and load_tokenizer read it.
        overwrite (bool): Replace a folder that an earlier call wrote. Default: False.

    Returns:
        transformers.PreTrainedTokenizerFast, which puts <s> before a text unless called with add_special_tokens=False.

    Raises:
        TokenizerError: vocab_size is too small, the texts are empty, or ``path`` exists.
    """
    check_tokenizer_output(path, overwrite)
    tokenizer = fit_tokenizer(texts, vocab_size)
    save_tokenizer(tokenizer, path)
    return tokenizer


def fit_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Trains a tokenizer as train_tokenizer does, but does not save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise TokenizerError(
            f"A vocabulary of {vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens and 256 "
            f"bytes make {SMALLEST_VOCABULARY}. Give at least {SMALLEST_VOCABULARY}."
        )
    texts = [text for text in texts if text]
    if not texts:
        raise TokenizerError("There is no text to train a tokenizer on: give train_tokenizer one that is not empty.")
    unk, bos, eos, pad = SPECIAL_TOKENS
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=sys.stderr.isatty(),
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, SPECIAL_TOKENS.index(bos))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unk,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", path: str) -> None:
    """Saves a trained tokenizer atomically; an earlier one is replaced (see check_tokenizer_output)."""
    with atomic.replace_folder(path) as folder:
        tokenizer.save_pretrained(folder)


def check_tokenizer_output(path: str, overwrite: bool) -> None:
    """Raises TokenizerError unless a tokenizer may be saved at ``path``: it replaces only a trained tokenizer."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise TokenizerError(
            f"{path} exists already: ask to overwrite it (--overwrite), or give the new tokenizer another path."
        )
    others = sorted(set(os.listdir(path)) - _TRAINED_FILES) if os.path.isdir(path) else [os.path.basename(path)]
    if others:
        raise TokenizerError(
            f"{path} is not overwritten, because it holds more than a trained tokenizer: "
            f"{first_ten(others)}. Give the new tokenizer another path."
        )


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizer settings of a conversion; ``tokenizer``, ``train_size`` and the others are as in Settings."""

    tokenizer: Any
    train_size: Optional[int] = None
    train_texts: Sequence[str] = ()
    base: Optional[str] = None

    def check(self, overwrite: bool) -> None:
        """Raises DataError or TokenizerError for a wrong setting, a missing file or a bad output path."""
        if self.base is not None and not os.path.exists(self.base):
            raise DataError(f"base: {self.base} does not exist. Name the checkpoint that is trained on the data.")
        if self.train_size is None:
            if self.train_texts:
                raise DataError(
                    "train_texts names texts for a new tokenizer, but its size is missing: set train_vocab_size "
                    "(--train-tokenizer VOCAB_SIZE)."
                )
            return
        if not isinstance(self.tokenizer, str):
            raise DataError(
                "train_vocab_size requests a new tokenizer: give the path to save it at, not a loaded tokenizer."
            )
        for path in self.train_texts:
            if bare_name(path).endswith(_ENDINGS_OF_ROWS):
                raise DataError(
                    f"train_texts: {path} holds rows, but a tokenizer learns from plain text here: convert it "
                    "with --input, or write its texts to a .txt file."
                )
            if not os.path.isfile(path):
                raise DataError(f"train_texts: there is no file {path}. Check the path.")
        check_tokenizer_output(self.tokenizer, overwrite)

    def load(self, texts: Iterable[str], chat_template: Optional[str] = None) -> Tuple[Any, List[str]]:
        """Returns the tokenizer, trained on ``texts`` if requested, and notes on it for the user."""
        if self.train_size is None:
            loaded = load_tokenizer(self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer
            return loaded, self._of_the_base(loaded)
        trained = fit_tokenizer(self._all_texts(texts), self.train_size)
        trained.chat_template = chat_template
        learned_from = ", ".join(["this data", *self.train_texts])
        notes = [f"{self.tokenizer}: a tokenizer of {len(trained)} tokens, trained on {learned_from}"]
        if len(trained) < self.train_size:
            notes.append(
                f"it is smaller than the {self.train_size} tokens requested, because no other pair occurs twice"
            )
        return trained, notes + self._of_the_base(trained)

    def save(self, loaded: Any) -> None:
        """Saves the tokenizer that ``load`` returned, if it was trained."""
        if self.train_size is not None:
            save_tokenizer(loaded, self.tokenizer)

    def _all_texts(self, texts) -> Iterator[str]:
        yield from texts
        for path in self.train_texts:
            yield from pieces(read_text(path))

    def _of_the_base(self, loaded) -> List[str]:
        """Returns a warning if the base was, or for a new tokenizer may have been, trained with another vocabulary."""
        new = self.train_size is not None
        if self.base is None:
            return [_ONLY_FROM_SCRATCH + " (--base compares it with the base's)"] if new else []
        beside = _tokenizer_beside(self.base)
        if beside is not None:
            of_base = load_tokenizer(beside).get_vocab()
            vocabulary = loaded.get_vocab()
            differing = sum(of_base.get(token) != number for token, number in vocabulary.items())
            if not differing:
                return []
            difference = f"{differing} of {len(vocabulary)} tokens have another id, or none, in the tokenizer beside it"
            return [_another_vocabulary(self.base, difference, f"Use {beside}")]
        rows = _embedding_rows(self.base)
        size = vocabulary_size(loaded)
        if rows is not None and (rows < size or new and rows != size):
            difference = f"its embedding has {rows} rows, and the tokenizer {size} ids"
            return [_another_vocabulary(self.base, difference, "Use its own tokenizer")]
        return [f"no tokenizer is beside {self.base}, so only sizes were compared. {_ONLY_FROM_SCRATCH}"] if new else []


def _another_vocabulary(base, difference, way_out) -> str:
    return (
        f"WARNING: {base} was trained with another vocabulary: {difference}. Its embeddings would mean other tokens. "
        f"{way_out}, or train a base from scratch with this one"
    )


def _tokenizer_beside(base: str) -> Optional[str]:
    """Returns the tokenizer in the folder of a checkpoint."""
    folder = base if os.path.isdir(base) else os.path.dirname(os.path.abspath(base))
    paths = (os.path.join(folder, name) for name in ("tokenizer.json", "tokenizer.model"))
    return next(filter(os.path.isfile, paths), None)


def _embedding_rows(base: str) -> Optional[int]:
    """Returns the number of ids for which a checkpoint has embeddings; None if it has no embedding."""
    with BaseCheckpoint(base) as checkpoint:
        table = checkpoint.tensors.get(checkpoint.architecture.embedding_table(checkpoint.world))
        return table.shape[0] if table else None


def _brief(error):
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
