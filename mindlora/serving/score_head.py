"""ScoreHead: an adapter's head of a classifier or a reward model, which stays in host memory.

It reads a few tokens of a text, so it needs no slot; the adapter's pairs are in one like any adapter's.
"""

import json
import os
from typing import List, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core.errors import AdapterFormatError, RequestError, ShapeMismatchError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.files.adapters.adapter import Adapter
from mindlora.models.architectures.classifiers import SCORE

# In an adapter's folder: a list of the labels' names, in the order of their numbers.
NAMES_FILE = "labels.json"
_WEIGHT, _BIAS = f"{SCORE.mindformers}.weight", f"{SCORE.mindformers}.bias"


class ScoreHead(NamedTuple):
    """scores = hidden W^T + b.

    Attributes:
        weight (array): float32 [labels, hidden].
        bias (array or None): float32 [labels].
        names (tuple of str): Names of the labels.
        of_tokens (bool): Whether it labels each token (TOKEN_CLS), rather than whole texts (SEQ_CLS).
    """

    weight: np.ndarray
    bias: Optional[np.ndarray]
    names: Tuple[str, ...]
    of_tokens: bool

    @property
    def is_reward(self) -> bool:
        """Whether it has a single score, so that there is no label to choose."""
        return len(self.weight) == 1

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def scores(self, hidden: np.ndarray) -> np.ndarray:
        """Returns scores, float32 [tokens, labels], given the head's inputs, float32 [tokens, hidden]."""
        scores = hidden @ self.weight.T
        return scores if self.bias is None else scores + self.bias


def take_score(adapter: Adapter, hidden: Optional[int], source: str) -> Optional[ScoreHead]:
    """Removes the head of a classifier from an adapter and returns it; None if the adapter has none.

    ``hidden`` is the width of the model; ``source`` is the adapter's path, beside which labels.json may be.

    Raises ShapeMismatchError for a head of another width, AdapterFormatError for names that do not match its
    labels.
    """
    weight = adapter.saved_modules.pop(_WEIGHT, None)
    if weight is None:
        return None
    bias = adapter.saved_modules.pop(_BIAS, None)
    if weight.ndim != 2 or hidden not in (None, weight.shape[1]):
        raise ShapeMismatchError(
            f"{source}: {_WEIGHT}, the head of a classifier, is {list(weight.shape)}, but the model's width is "
            f"{hidden}. Load it into the model it was trained on."
        )
    # Files other than PEFT's do not state the task. transformers' head for tokens has a bias, that for texts has none.
    task = adapter.peft_fields.get("task_type")
    of_tokens = task == "TOKEN_CLS" or (task != "SEQ_CLS" and bias is not None)
    names = _names(source, len(weight))
    return ScoreHead(to_float32(weight), None if bias is None else to_float32(bias), names, of_tokens)


def _names(source: str, count: int) -> Tuple[str, ...]:
    path = os.path.join(source, NAMES_FILE)
    if not os.path.isfile(path):
        # transformers' names for labels without names.
        return tuple(f"LABEL_{number}" for number in range(count))
    with open(path, encoding="utf-8") as file:
        return checked_names(read_names(file.read(), path), count, path)


def read_names(text: str, source: str) -> List[str]:
    """Returns the names in the text of a labels.json; raises AdapterFormatError unless it is a JSON list of strings."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{source} is not JSON: {error}. Write a list of the labels' names.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise AdapterFormatError(f"{source} must hold a JSON list of texts, the names of the labels in their order.")
    return names


def checked_names(names: List[str], count: int, source: str) -> Tuple[str, ...]:
    """Returns the names of ``count`` labels; raises AdapterFormatError unless there are as many distinct names."""
    if len(names) != count or len(set(names)) != count:
        raise AdapterFormatError(
            f"{source} names {len(set(names))} labels, but the head has {count} scores: name each of them once."
        )
    return tuple(names)


def misuse(name: Optional[str], head: Optional[ScoreHead], wants_scores: bool) -> Optional[RequestError]:
    """Returns why an adapter, or the base if the name is None, cannot serve the request; None if it can.

    ``wants_scores`` says whether the request is for the scores of a head, rather than an answer or an embedding.
    """
    who = "The base" if name is None else name
    if wants_scores and head is None:
        return RequestError(
            f"{who} has no score head, so it gives no labels: ask an adapter of a classifier (PEFT's task_type SEQ_CLS "
            "or TOKEN_CLS)."
        )
    if head is not None and not wants_scores:
        kind = "a reward model" if head.is_reward else "a classifier"
        return RequestError(
            f"{who} is {kind}, which writes no text and embeds none: ask it for labels or scores (mindlora classify, "
            "/v1/score, /v1/classify)."
        )
    return None


def probabilities_of(scores: np.ndarray) -> np.ndarray:
    """Returns softmax(scores) along the last axis, float64."""
    shifted = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)
