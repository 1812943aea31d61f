"""Logarithms of probabilities, in the forms of both APIs."""

import contextlib
import functools
from typing import Any, List, Optional

from mindlora.serving.detokenizer import REPLACEMENT, TextDecoder
from mindlora.serving.server import schemas


class TokenTexts:
    """Texts of single tokens, their spaces included.

    Args:
        decoder (TextDecoder): Of the tokenizer.
        tokenizer: Names the tokens that have no text: special ones.
    """

    def __init__(self, decoder: TextDecoder, tokenizer: Any):
        def text(token: int) -> str:
            shown = decoder.decode([token], first=False) if decoder.has_text(token) else ""
            if not shown:
                with contextlib.suppress(IndexError):  # the model may know more ids than the tokenizer
                    shown = tokenizer.convert_ids_to_tokens(token) or ""
            return shown

        self.text = functools.lru_cache(maxsize=65536)(text)


def for_completion(texts: TokenTexts, logprobs: List[Any], offset: int) -> schemas.CompletionLogprobs:
    """Returns the logprobs of a piece as /v1/completions shows them.

    Args:
        texts (TokenTexts): Texts of the tokens.
        logprobs (list of Sampled): One for each token.
        offset (int): Characters before the first of them, as the texts of single tokens count them.
    """
    tokens = [texts.text(entry.token) for entry in logprobs]
    offsets = [offset]
    for token in tokens[:-1]:
        offsets.append(offsets[-1] + len(token))
    return schemas.CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[entry.logprob for entry in logprobs],
        # The chosen token is among them in any case, as in OpenAI's.
        top_logprobs=[
            {texts.text(token): value for token, value in (*entry.top, (entry.token, entry.logprob))}
            for entry in logprobs
        ],
        text_offset=offsets[: len(tokens)],
    )


def for_chat(texts: TokenTexts, logprobs: List[Any]) -> schemas.ChatLogprobs:
    """Returns the logprobs of a piece as /v1/chat/completions shows them."""
    return schemas.ChatLogprobs(
        content=[
            schemas.TokenLogprobs(
                **_token(texts, entry.token, entry.logprob),
                top_logprobs=[schemas.TopLogprob(**_token(texts, token, value)) for token, value in entry.top],
            )
            for entry in logprobs
        ]
    )


def _token(texts, token, logprob):
    text = texts.text(token)
    # The bytes of a part of a character are not known.
    known = None if REPLACEMENT in text else list(text.encode("utf-8"))
    return {"token": text, "logprob": logprob, "bytes": known}


def joined(parts: List[Optional[Any]]) -> Optional[Any]:
    """Returns the logprobs of an answer from those of its pieces; None where no piece has any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    fields = type(known[0]).model_fields
    return type(known[0])(**{name: [entry for part in known for entry in getattr(part, name)] for name in fields})
