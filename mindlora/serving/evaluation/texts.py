"""Perplexity and bits per byte, of texts in windows that overlap and of held-out rows as training sees them."""

import dataclasses
import math
from typing import Any, Dict, Iterator, List, Sequence

import numpy as np

from mindlora.core.errors import DataError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.data import tokenizers
from mindlora.data.files import bare_name, pieces, read_text
from mindlora.data.sources import Layout, read_inputs
from mindlora.run.checks.data_rows import BOUNDARY
from mindlora.serving.engine import Engine
from mindlora.serving.evaluation.scoring import Model, Passage, Scores, score
from mindlora.serving.evaluation.statistics import Measure, measure

_LAYOUT = Layout(("text",))


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A passage, and what its scored tokens count.

    Attributes:
        counts (array): bool, for each scored token whether it counts.
        bytes (float): Bytes of text, in UTF-8, that the tokens which count stand for.
    """

    passage: Passage
    counts: np.ndarray
    bytes: float


def read_documents(path: str, separator: str = "") -> List[str]:
    """Returns the texts in a file: the column ``text`` of rows, or a file in plain text (.txt), cut at ``separator``.

    Raises DataError if there is none, or the file cannot be read.
    """
    if not bare_name(path).endswith(".txt"):
        texts = [_text_of(row) for row in read_inputs(path, _LAYOUT)[0].rows]
    else:
        text = read_text(path)
        texts = text.split(separator) if separator else [text]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(f"{path} holds no text. Give another file.")
    return texts


def _text_of(row):
    text = row.record.get("text") if isinstance(row.record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{row.location} has no text in its column 'text'. Correct the row, or remove it.")
    return text


def start_tokens(tokenizer: Any) -> List[int]:
    """Returns what comes before the first token of a text, for it to be predicted: bos, or else eos, or nothing."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    return []


def windows(tokens: Sequence[int], seq_length: int, overlap: int) -> Iterator[Passage]:
    """Yields passages in which each token but the first is scored once.

    A passage predicts up to ``seq_length`` tokens. Each but the first one has ``overlap`` tokens, 1 to seq_length, of
    the passage before it for a beginning, which it does not score again.

    Source: Baevski and Auli, Adaptive Input Representations for Neural Language Modeling, 2019.
    """
    begin, end = 0, 1
    while end < len(tokens):
        first = end - begin
        end = min(begin + seq_length + 1, len(tokens))
        yield Passage(list(tokens[begin:end]), first)
        begin = end - overlap


def passages_of_texts(texts: Sequence[str], tokenizer: Any, seq_length: int, overlap: int) -> List[ScoredText]:
    """Returns the windows of texts; all tokens count. Raises DataError if there is nothing to score."""
    made = []
    start = start_tokens(tokenizer)
    for text in texts:
        tokens = [*start]
        for piece in pieces(text):
            tokens += tokenizers.encode(tokenizer, piece)
        # A window has its share of the text's bytes, by its tokens.
        share = len(text.encode("utf-8")) / max(len(tokens) - 1, 1)
        for passage in windows(tokens, seq_length, overlap):
            count = len(passage.tokens) - passage.first
            made.append(ScoredText(passage, np.ones(count, bool), count * share))
    if not made:
        raise DataError(f"{len(texts)} texts have one token each, and nothing to predict. Give longer ones.")
    return made


def passages_of_rows(path: str, tokenizer: Any, seq_length: int) -> List[ScoredText]:
    """Returns the rows of a MindRecord of ``mindlora data``, of which the tokens count that have a label.

    Examples that are packed into one row are apart. ``path`` may be a folder of MindRecords. Raises DataError if it
    cannot be read, or a row is longer than ``seq_length`` + 1 tokens.
    """
    made = []
    for row in _rows(path):
        tokens, labels = row["input_ids"], row["labels"]
        counts = labels != IGNORE_TOKEN_ID
        if tokens.shape != labels.shape or (labels[counts] != tokens[counts]).any():
            raise DataError(f"{path}: labels are not the tokens of their places. Convert the data with mindlora data.")
        if len(tokens) > seq_length + 1:
            raise DataError(
                f"{path} has rows of {len(tokens)} tokens, and the engine predicts {seq_length} at once. Set "
                f"--seq-length {len(tokens) - 1}."
            )
        boundary = row.get(BOUNDARY)
        begins = [0] if boundary is None else [0, *np.flatnonzero(tokens[1:] == boundary.item()) + 1]
        for begin, end in zip(begins, [*begins[1:], len(tokens)]):
            made += _example(tokens[begin:end], counts[begin:end], tokenizer)
    if not made:
        raise DataError(f"{path} has no row with a label that counts. Convert the data again.")
    return made


def _example(tokens: np.ndarray, counts: np.ndarray, tokenizer: Any) -> List[ScoredText]:
    """Returns an example without what comes after its last token that counts; nothing if none counts."""
    places = np.flatnonzero(counts[1:]) + 1
    if not len(places):
        return []
    first, end = int(places[0]), int(places[-1]) + 1
    text = tokenizer.decode(tokens[places].tolist(), skip_special_tokens=True)
    return [ScoredText(Passage(tokens[:end].tolist(), first), counts[first:end], len(text.encode("utf-8")))]


def _rows(path: str) -> Iterator[Dict[str, np.ndarray]]:
    from mindspore.dataset import MindDataset

    files = mindrecord_files(path)
    try:
        rows = MindDataset(files, shuffle=False, num_parallel_workers=1)
        yield from rows.create_dict_iterator(num_epochs=1, output_numpy=True)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{path} cannot be read as a MindRecord: {reason} Name one that mindlora data wrote."
        ) from error


def measure_texts(
    engine: Engine, texts: Sequence[ScoredText], models: Sequence[Model], source: str, seed: int
) -> List[Measure]:
    r"""Returns perplexity and bits per byte of texts by the models.

        perplexity = exp(-sum_i log p_i / n),    bits per byte = -sum_i log2 p_i / bytes

    over the n tokens that count; the examples that are resampled are windows or rows.
    """
    scores = score(engine, [text.passage for text in texts], models)
    nats = {model: _nats(texts, scores[model]) for model in models}
    tokens = np.array([text.counts.sum() for text in texts], np.float64)
    found = [measure("perplexity", source, True, nats, tokens, np.exp, seed)]
    size = np.array([text.bytes for text in texts], np.float64)
    # No bytes: the labels of all rows are special tokens.
    if size.sum() > 0:
        found.append(measure("bits per byte", source, True, nats, size, lambda mean: mean / math.log(2), seed))
    return found


def _nats(texts: Sequence[ScoredText], scores: Sequence[Scores]) -> np.ndarray:
    """Returns -log p of what counts in each text, float64 [texts]."""
    return np.array([-one.logprobs[text.counts].sum() for one, text in zip(scores, texts)])
