"""Converts tokens to the text of an answer, in pieces that are final (Detokenizer), up to its end (Stopping)."""

import contextlib
import functools
import logging
import re
from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple, Union

from mindlora.core.errors import RequestError
from mindlora.data import tokenizers
from mindlora.models.thoughts import FAMILIES
from mindlora.serving.request import Sampling
from mindlora.serving.tools import CALL_MARKS

logger = logging.getLogger("mindlora")
# The character that decoders write for bytes that are not, or not yet, a character of UTF-8.
REPLACEMENT = "\ufffd"
# After this many tokens without a whole character, the bytes will not become one.
_LONGEST = 16


def special_tokens(tokenizer: Any) -> FrozenSet[int]:
    """Returns the tokens that are not text: those with a role in the tokenizer, and others added as special."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {place for place, token in added if token.special}


def _marks(tokenizer: Any) -> FrozenSet[int]:
    """Returns the tokens that mark thoughts and calls."""
    texts = {mark for marks in FAMILIES for mark in (marks.begin, marks.end)} | {*CALL_MARKS}
    return frozenset(place for place, token in tokenizer.added_tokens_decoder.items() if token.content in texts)


class TextDecoder:
    """The tokens of one tokenizer as text. Special tokens, and ids that the tokenizer lacks, have no text.

    Marks of thoughts and calls always have text, since the parts of an answer are recognized by them.

    Build it once, since it goes through the vocabulary.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer) - _marks(tokenizer)
        self._size = tokenizers.vocabulary_size(tokenizer)
        # Decoded behind this, a token keeps the space that decoders remove from the first one.
        self._before = tokenizers.encode(tokenizer, "a")
        self._before_text = self._decoded(self._before)

    def has_text(self, token: int) -> bool:
        """Returns whether a token can have a text."""
        return 0 <= token < self._size and token not in self._special

    def decode(self, tokens: Sequence[int], first: bool = True) -> str:
        """Returns the text of tokens; for the ``first`` ones of a text, without the space before its first word."""
        shown = [token for token in tokens if self.has_text(token)]
        return self._decoded(shown) if first else self._decoded(self._before + shown)[len(self._before_text) :]

    def _decoded(self, tokens):
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one answer. All pieces together equal the text from decoding all tokens at once after the prompt.

    Only the tokens since the last whole character are decoded. Where a tokenizer falls back to bytes one by one, bytes
    that are not UTF-8 make their whole run unreadable when it is decoded at once; here, the characters
    before them have already been returned. The prompt must end with a whole character.
    """

    def __init__(self, decoder: TextDecoder, prompt: Sequence[int]):
        self._decoder = decoder
        self._first = not any(decoder.has_text(token) for token in prompt)
        self._pending: List[int] = []
        self._given = 0

    def add(self, token: int) -> str:
        """Returns the text that becomes final with one more token, often the token's own; may be empty."""
        if not self._decoder.has_text(token):
            return ""
        self._pending.append(token)
        text = self._shown(self._pending)
        final = text.rstrip(REPLACEMENT)
        if len(final) == len(text):
            return self._give(text, len(self._pending))
        if len(self._pending) > _LONGEST:
            for count in range(len(self._pending) - 1, len(self._pending) - 5, -1):
                head = self._shown(self._pending[:count])
                if head + self._decoder.decode(self._pending[count:], first=False) == text:
                    return self._give(head, count)
        piece = final[self._given :]
        self._given += len(piece)
        return piece

    def finish(self) -> str:
        """Returns the rest of the text, at the end of the answer."""
        return self._give(self._shown(self._pending), len(self._pending))

    def _shown(self, tokens):
        return self._decoder.decode(tokens, first=self._first)

    def _give(self, text, count):
        """Returns the part of the text of the first ``count`` tokens that has not been returned, and forgets them."""
        piece = text[self._given :]
        self._first = self._first and not count
        self._given = max(0, self._given - len(text))
        del self._pending[:count]
        return piece


def end_tokens(tokenizer: Any, configured: Union[int, Sequence[int], None] = None) -> FrozenSet[int]:
    """Returns the tokens that end an answer: the tokenizer's eos, and eos_token_id of the model's configuration.

    An id of the configuration that is an ordinary token of this tokenizer is left out with a warning: MindFormers'
    default, 2, is a character in many vocabularies.
    """
    configured = [configured] if isinstance(configured, int) else list(configured or [])
    special = special_tokens(tokenizer)
    size = tokenizers.vocabulary_size(tokenizer)
    for token in configured:
        if token not in special and 0 <= token < size:
            logger.warning(
                "eos_token_id %s of the configuration is the text %r of the tokenizer: answers do not end with it. "
                "Correct eos_token_id.",
                token,
                tokenizer.convert_ids_to_tokens(token),
            )
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset(eos) | (frozenset(configured) & special)


class Stopping:
    """Converts one answer's tokens to text, up to its end.

    An answer ends with an end token or the first stop string that is complete ("stop"), or with max_tokens or the
    model's window ("length"). A stop string that is complete within the first min_tokens tokens is text. Neither end
    tokens nor other stop strings are part of the text, unless stop strings are shown. A possible beginning
    of a stop string is held back until it is decided. ``room`` counts the tokens that the window has behind the
    prompt; ``ends`` are the tokens that end every answer, and as an attribute those that end this one.

    Raises RequestError if a stop string is empty.
    """

    def __init__(self, sampling: Sampling, detokenizer: Detokenizer, ends: FrozenSet[int], room: int):
        if not all(isinstance(stop, str) and stop for stop in sampling.stop):
            raise RequestError("stop has an entry that is not a text, or is empty: leave it out.")
        self._detokenizer = detokenizer
        self.ends = (frozenset() if sampling.ignore_eos else ends) | frozenset(sampling.stop_tokens)
        self._left = min(sampling.max_tokens, room)
        self._unsearched = sampling.min_tokens
        self._matcher = StopMatcher(sampling.stop, sampling.stop_is_shown)

    def add(self, token: int) -> Tuple[str, Optional[str]]:
        """Takes the next token, and returns the text that can be sent now, perhaps empty.

        The second value is "stop" or "length" if the answer has ended, and then the text is its rest; otherwise None.
        """
        self._left -= 1
        self._unsearched -= 1
        ended = token in self.ends
        text = "" if ended else self._detokenizer.add(token)
        if ended or not self._left:
            text += self._detokenizer.finish()
        text, stopped = self._matcher.add(text, self._unsearched < 0)
        if stopped:
            return text, "stop"
        if ended or not self._left:
            return text + self._matcher.finish(), "stop" if ended else "length"
        return text, None


class StopMatcher:
    """Finds nonempty stop strings in a text that comes in pieces, however it is cut.

    With ``shows``, the found stop string is part of the text.
    """

    def __init__(self, stops: Iterable[str], shows: bool = False):
        self._stops: List[str] = list(stops)
        self._shows = shows
        self._longest = max(map(len, self._stops), default=1)
        self._held = ""

    def add(self, piece: str, may_stop: bool = True) -> Tuple[str, bool]:
        """Takes the next piece, and returns the text that is decided, and whether a stop string followed it.

        It is the one that was complete first, the longest if several were. One that this piece completes is skipped
        unless it ``may_stop``.
        """
        if not self._stops:
            return piece, False
        text = self._held + piece
        # The held text contains no stop strings except skipped ones.
        places = [(text.find(stop, max(0, len(self._held) - len(stop) + 1)), stop) for stop in self._stops]
        complete = [(at + len(stop), at) for at, stop in places if at >= 0]
        if complete and may_stop:
            self._held = ""
            end, begin = min(complete)
            return text[: end if self._shows else begin], True
        # The place where an incomplete stop string may begin.
        places_left = range(max(0, len(text) - self._longest + 1), len(text))
        begin = next((at for at in places_left if self._begins(text[at:])), len(text))
        self._held = text[begin:]
        return text[:begin], False

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the answer."""
        held = self._held
        self._held = ""
        return held

    def _begins(self, text):
        return any(len(stop) > len(text) and stop.startswith(text) for stop in self._stops)


class TokenTexts:
    """Texts of single tokens, including spaces; the tokenizer names special tokens, which have no text.

    ``text`` returns the text of a token, with U+FFFD for incomplete characters.
    """

    def __init__(self, decoder: TextDecoder, tokenizer: Any):
        # Not at the top: callers with a tokenizer have imported it, and it would delay others.
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._decoder = decoder
        self._tokenizer = tokenizer
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self.text = functools.lru_cache(maxsize=65536)(self._text)

    def data(self, token: int) -> bytes:
        """Returns a token's text in UTF-8; for a part of a character, its bytes."""
        if not self._decoder.has_text(token):
            return b""
        text = self._decoder.decode([token], first=False)
        return self._stored(token, text) if REPLACEMENT in text else text.encode("utf-8")

    def name(self, token: int) -> str:
        r"""Returns the text of a token; for a part of a character, its bytes in OpenAI's form: bytes:\xe6."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return text
        data = self.data(token)
        return text if data == text.encode("utf-8") else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def named(self, values: Iterable[Tuple[int, float]]) -> Dict[str, float]:
        """Returns the values of tokens by name; a second token of the same name is named token_id:NUMBER."""
        tokens: Dict[str, int] = {}
        named: Dict[str, float] = {}
        for token, value in values:
            name = self.name(token)
            if tokens.setdefault(name, token) != token:
                name = f"token_id:{token}"
            named[name] = value
        return named

    def _text(self, token: int) -> str:
        shown = self._decoder.decode([token], first=False) if self._decoder.has_text(token) else ""
        if not shown:
            with contextlib.suppress(IndexError):  # the model may know more ids than the tokenizer
                shown = self._tokenizer.convert_ids_to_tokens(token) or ""
        return shown

    def _stored(self, token: int, text: str) -> bytes:
        """Returns the bytes of a token in the vocabulary: in characters that stand for bytes, or as <0xE6>."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        fallback = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        if all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        return text.encode("utf-8")
