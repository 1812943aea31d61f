"""Tokenizers: loads those of Hugging Face and sentencepiece, and trains small ones."""

import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Iterable, List, NamedTuple, Optional, Tuple

from mindlora.common import atomic
from mindlora.common.git_lfs import refuse_pointer
from mindlora.errors import TokenizerError

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


class SpecialIds(NamedTuple):
    """Ids of the special tokens.

    Attributes:
        bos (int or None): Beginning of sequence; None if the tokenizer has no such token, and rows then have none.
        eos (int): End of sequence.
        pad (int): Padding.
        notes (tuple of str): What is done instead if the tokenizer lacks a token.
    """

    bos: Optional[int]
    eos: int
    pad: int
    notes: Tuple[str, ...]


def load_tokenizer(path: str) -> Any:
    """Loads a tokenizer from local files; if a folder holds both kinds, from tokenizer.json.

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
            shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
            raise TokenizerError(f"No tokenizer in the folder {path}; it holds {shown or 'nothing'}. {_ACCEPTED}")
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

    try:
        # Not AutoTokenizer: tokenizer.json is complete, and needs no tokenizer class of its model.
        return PreTrainedTokenizerFast.from_pretrained(os.path.dirname(os.path.abspath(path)), local_files_only=True)
    except Exception as error:  # the library raises bare Exception for a tokenizer.json that it cannot parse
        raise TokenizerError(
            f"Hugging Face's PreTrainedTokenizerFast cannot load {path} with the "
            f"tokenizer_config.json beside it: {_brief(error)}"
        ) from error


def _load_sentencepiece(path):
    # MindFormers is slow to import and writes a log folder, so only sentencepiece files import it.
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
    """Returns the ids that begin, end and pad a row. Without a pad token, eos pads, and its labels there are ignored.

    Raises:
        TokenizerError: There is no end-of-sequence token, without which a model could not learn to stop.
    """
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
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
        texts (iterable of str): What to learn from.
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
    """Like train_tokenizer, but without saving.

    Args:
        texts (iterable of str): What to learn from.
        vocab_size (int): Number of ids, the special ones included; at least 260.

    Returns:
        transformers.PreTrainedTokenizerFast.

    Raises:
        TokenizerError: vocab_size is too small, or the texts are empty.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise TokenizerError(
            f"A vocabulary of {vocab_size} is too small: {len(SPECIAL_TOKENS)} special tokens and 256 "
            f"bytes make {SMALLEST_VOCABULARY}."
        )
    texts = [text for text in texts if text]
    if not texts:
        raise TokenizerError("There is no text to train a tokenizer on.")
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
            f"{', '.join(others[:10])}. Give the new tokenizer another path."
        )


def _brief(error):
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
