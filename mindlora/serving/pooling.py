"""Pooling: from the hidden states of a text's tokens to its embedding, as the files of a model say it.

They are those of sentence-transformers: modules.json, the config.json of its Pooling, and sentence_bert_config.json.
"""

import json
import os
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core.errors import ConfigError, RequestError
from mindlora.core.json_files import parse_object
from mindlora.core.text import first_ten

# sentence-transformers' names of modes -> ours.
_MODES = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}
_FLAG = "pooling_mode_"


class Pooling(NamedTuple):
    """How a model embeds a text.

    Attributes:
        mode (str): "last" or "first", the hidden state of that token; "mean", of all tokens.
        normalizes (bool): Whether an embedding has norm 1.
        dimensions (tuple of int): To which an embedding may be cut (Kusupati et al., Matryoshka Representation
            Learning, 2022); () for none.
        any_dimension (bool): Whether it may be cut to any.
        max_tokens (int or None): Tokens of a text, at most.
    """

    mode: str
    normalizes: bool = False
    dimensions: Tuple[int, ...] = ()
    any_dimension: bool = False
    max_tokens: Optional[int] = None

    def check_dimensions(self, asked: Optional[int], width: int) -> None:
        """Raises RequestError if embeddings cannot be cut to ``asked``; None leaves them whole."""
        if asked is None or (self.any_dimension and asked <= width) or asked in self.dimensions:
            return
        if self.any_dimension or self.dimensions:
            accepted = first_ten([str(number) for number in self.dimensions]) if self.dimensions else f"1 to {width}"
            raise RequestError(f"dimensions is {asked}, and this model gives {accepted}: ask for one of these.")
        raise RequestError(
            f"dimensions is {asked}, and the model's config.json does not say that its embeddings can be cut "
            "(is_matryoshka, matryoshka_dimensions): leave it out."
        )

    def embed(self, hidden: np.ndarray, dimensions: Optional[int] = None) -> np.ndarray:
        """Returns float32 [width], or [dimensions], of the hidden states of a text.

        Args:
            hidden (np.ndarray): float32 [tokens, width]; for "last", that of the last token is enough.
            dimensions (int, optional): Numbers that are kept, before the norm is made 1. Default: None, all.
        """
        row = {"last": hidden[-1], "first": hidden[0], "mean": hidden.mean(0, dtype=np.float64)}[self.mode]
        row = row[:dimensions].astype(np.float64)
        if self.normalizes:
            row = row / max(float(np.linalg.norm(row)), 1e-12)
        return row.astype(np.float32)


def read_pooling(folder: str) -> Optional[Pooling]:
    """Returns the pooling that a model's folder names; None if it names none (there is no modules.json).

    Raises ConfigError if it cannot be used here.
    """
    path = os.path.join(folder, "modules.json")
    if not os.path.isfile(path):
        return None
    modules = _read_modules(path)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
        raise ConfigError(
            f"{path} names the modules {first_ten(kinds)}; here they can be Transformer, Pooling and Normalize: use "
            "sentence-transformers itself."
        )
    mode = _read_mode(os.path.join(folder, modules[1][1], "config.json"))
    model = _read_object(os.path.join(folder, "config.json"))
    dimensions = tuple(model.get("matryoshka_dimensions") or ())
    any_dimension = bool(model.get("is_matryoshka")) and not dimensions
    return Pooling(mode, "Normalize" in kinds, dimensions, any_dimension, _read_max_tokens(folder))


def _read_modules(path: str) -> List[Tuple[str, str]]:
    """Returns the kind and the subfolder of each module, in order."""
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
        return [(str(entry["type"]).rpartition(".")[2], str(entry["path"])) for entry in entries]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} is not a list of modules with type and path: copy it again.") from error


def _read_mode(path: str) -> str:
    config = _read_object(path)
    named = config.get("pooling_mode")
    if named is None:
        modes = [key[len(_FLAG) :] for key, value in config.items() if key.startswith(_FLAG) and value]
    else:
        modes = [named] if isinstance(named, str) else list(named)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ConfigError(
            f"{path} asks for the pooling {first_ten(modes)}; here it can be one of lasttoken, mean_tokens and "
            "cls_token: use sentence-transformers itself."
        )
    return _MODES[modes[0]]


def _read_max_tokens(folder: str) -> Optional[int]:
    path = os.path.join(folder, "sentence_bert_config.json")
    config = _read_object(path)
    if config.get("do_lower_case"):
        raise ConfigError(f"{path} has do_lower_case, which is not done here: use sentence-transformers itself.")
    return config.get("max_seq_length")


def _read_object(path: str) -> Any:
    """Returns the content of a JSON file; an empty one where there is no such file."""
    if not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        return parse_object(file.read(), path, ConfigError)
