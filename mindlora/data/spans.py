"""Spans of a text to tokens: which tokens lie inside."""

from typing import Any, List, Sequence, Tuple

import numpy as np

from mindlora.data.conversion import Encoded
from mindlora.data.examples import UnusableRow

# Where a span of characters begins and ends.
Span = Tuple[int, int]


def encode_spans(tokenizer: Any, text: str, spans: Sequence[Span]) -> Encoded:
    """Returns the tokens of a text, of which those inside the spans are learned. No special token is added.

    The text is tokenized as a whole, as at inference. If a token then reaches across the end of a span, such as a new
    line of the prompt joined with one that the answer begins with, the text is tokenized in two parts there.

    Args:
        tokenizer (transformers.PreTrainedTokenizerFast): Tells which characters a token stands for.
        text (str): With its special tokens written out.
        spans (sequence of (int, int)): Ranges of characters that do not overlap.

    Returns:
        Encoded.

    Raises:
        UnusableRow: The tokenizer cannot tokenize the text in parts.
    """
    tokens, starts, ends = _tokens_of(tokenizer, text)
    edges = sorted({edge for span in spans for edge in span})
    cuts = [edge for edge in edges if ((starts < edge) & (edge < ends)).any()]
    if cuts:
        whole = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        bounds = list(zip([0, *cuts], [*cuts, len(text)]))
        parts = [(begin, _tokens_of(tokenizer, text[begin:end])) for begin, end in bounds]
        tokens = np.concatenate([part[0] for _, part in parts])
        starts = np.concatenate([part[1] + begin for begin, part in parts])
        # Tokenizers of the sentencepiece kind put a space before each part.
        if tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False) != whole:
            raise UnusableRow("a token that holds the end of one turn and the beginning of the next")
    learned = np.zeros(len(tokens), bool)
    for begin, end in spans:
        learned |= (starts >= begin) & (starts < end)
    return Encoded(tokens, learned)


def _tokens_of(tokenizer: Any, text: str) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the ids of a text, int32 [n], and where their characters begin and end, int64 [n] each."""
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.array(coded["offset_mapping"], np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(offsets[:, 1])
    # Some tokenizers leave the space before a word out of its range: it belongs to the word's token all the same.
    starts = np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]]))
    return np.array(coded["input_ids"], np.int32), starts, ends


def ends_of_learned(learned: np.ndarray) -> List[int]:
    """Returns how many tokens there are up to the end of each run of learned ones."""
    following = np.append(learned[1:], False)
    return (np.flatnonzero(learned & ~following) + 1).tolist()
