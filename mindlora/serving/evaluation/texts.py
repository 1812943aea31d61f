"""Likelihoods of texts under a base and its adapters: perplexity, bits per byte, forgetting.

Texts are read in overlapping windows, held-out rows as in training. Forgetting measures how far an adapter has moved
the model away from its base's own texts, without any data."""

import collections
import dataclasses
import math
from typing import Any, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import DataError
from mindlora.core.fields import IGNORE_TOKEN_ID
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.data import tokenizers
from mindlora.data.conversion import progress
from mindlora.data.sources import Layout, bare_name, pieces, read_inputs, read_text
from mindlora.run.checks.data_rows import BOUNDARY
from mindlora.serving.answer import Stream
from mindlora.serving.engine import Engine
from mindlora.serving.evaluation.statistics import Measure, measure
from mindlora.serving.request import Request, Sampling

# The name of an adapter, or None for the base.
Model = Optional[str]
_LAYOUT = Layout(("text",))
FORGETTING = "forgetting"
FORGETTING_SOURCE = "samples of the base"


class Passage(NamedTuple):
    """Tokens that are scored from index ``first``, at least 1, on; at most seq_length + 1 of them."""

    tokens: List[int]
    first: int = 1


class Scores(NamedTuple):
    """A model's scores of the n scored tokens of a passage.

    Attributes:
        logprobs (array [n]): float64, log p(token | tokens before it), in nats.
        likeliest (array [n]): int64, the token that the model would have chosen.
    """

    logprobs: np.ndarray
    likeliest: np.ndarray


def score(engine: Engine, passages: Sequence[Passage], models: Sequence[Model]) -> Dict[Model, List[Scores]]:
    """Returns the scores of each passage by each model, computed together by a started engine.

    Raises LoraError: the errors of Engine.submit, and that of a failed request.
    """
    asked = [
        (passage.tokens, Sampling(max_tokens=0, prompt_logprobs=1, scored_from=passage.first), model)
        for passage in passages
        for model in models
    ]
    scores: Dict[Model, List[Scores]] = {model: [] for model in models}
    for request, _ in progress(ask(engine, asked), "scoring", len(asked)):
        sampled = [request.prompt_logprobs[index] for index in sorted(request.prompt_logprobs)]
        logprobs = np.array([one.logprob for one in sampled], np.float64)
        likeliest = np.array([one.top[0][0] for one in sampled], np.int64)
        scores[request.adapter].append(Scores(logprobs, likeliest))
    return scores


def ask(engine: Engine, requests: Iterable[Tuple[List[int], Sampling, Model]]) -> Iterator[Tuple[Request, str]]:
    """Yields, in order, the finished request and the text of its answer for each (prompt, sampling, model).

    Requests beyond the queue's limit are sent as others end. Raises as ``score`` does.
    """
    waiting: Deque[Stream] = collections.deque()
    for tokens, sampling, model in requests:
        if len(waiting) == engine.scheduler.max_waiting:
            yield _finished(waiting.popleft())
        waiting.append(engine.submit(tokens, sampling, model))
    while waiting:
        yield _finished(waiting.popleft())


def _finished(stream: Stream) -> Tuple[Request, str]:
    return stream.request, stream.text()


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A passage, the scored tokens that count, and their bytes.

    Attributes:
        counts (array): bool, for each scored token whether it counts.
        bytes (float): Bytes of text, in UTF-8, for which the counted tokens stand.
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
    """Returns the tokens before the first token of a text, so that it is predicted: bos, or else eos, or none."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    return []


def windows(tokens: Sequence[int], seq_length: int, overlap: int) -> Iterator[Passage]:
    """Yields passages in which each token but the first is scored once.

    A passage predicts up to ``seq_length`` tokens. Each except the first begins with ``overlap`` tokens, 1 to
    seq_length, of the passage before it, which it does not score again.

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
    """Returns the rows of a MindRecord of ``mindlora data``, whose tokens with a label count.

    Examples packed into one row are separated. ``path`` may be a folder of MindRecords. Raises DataError if it
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
    """Returns an example up to its last counted token; an empty one if no token counts."""
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

    over the n counted tokens; windows or rows are the resampled examples.
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
    """Returns -log p of the counted tokens of each text, float64 [texts]."""
    return np.array([-one.logprobs[text.counts].sum() for one, text in zip(scores, texts)])


def measure_forgetting(engine: Engine, samples: int, max_tokens: int, models: Sequence[Model], seed: int) -> Measure:
    r"""Returns the Kullback-Leibler divergence of each model from the base, in nats per token, on the base's samples.

        KL(base || tuned) = E_{x ~ base} [log p_base(x) - log p_tuned(x)]

    The expectation is the mean over the tokens of ``samples`` texts that the base generates at temperature 1, each from
    the beginning and of up to ``max_tokens`` tokens, drawn by ``seed``; they are the examples that are resampled. Every
    adapter is measured on the same texts. It is 0 for the base; by chance it can be slightly below 0.

    Source: Kullback and Leibler, On Information and Sufficiency, 1951.
    """
    passages = draw_samples(engine, samples, max_tokens, seed)
    scores = score(engine, passages, models)
    sums = {model: _sums(scores[model]) for model in models}
    moved = {model: sums[None] - sums[model] for model in models}
    tokens = np.array([len(one.logprobs) for one in scores[None]], np.float64)
    return measure(FORGETTING, FORGETTING_SOURCE, True, moved, tokens, seed=seed)


def _sums(scores: Sequence[Scores]) -> np.ndarray:
    return np.array([one.logprobs.sum() for one in scores])


def draw_samples(engine: Engine, samples: int, max_tokens: int, seed: int) -> List[Passage]:
    """Returns texts that the base generates from the token that begins a text; all their tokens are scored.

    If the tokenizer has no such token, each text begins with another token of the vocabulary, which is not scored.
    """
    start = start_tokens(engine.tokenizer)
    first = np.random.default_rng(seed).integers(engine.runner.vocab_size, size=samples).tolist()
    length = min(max_tokens, engine.seq_length - 1)
    requests = [(start or [first[i]], Sampling(max_tokens=length, seed=seed + i), None) for i in range(samples)]
    return [Passage(list(request.tokens), 1) for request, _ in ask(engine, requests)]
