"""Detokenizer: the text of an answer, token by token, each piece final when it is given."""

from typing import Any, FrozenSet, List, Sequence

from mindlora.data import tokenizers

# What decoders write for bytes that are not, or not yet, a character of UTF-8.
REPLACEMENT = "\ufffd"
# After this many tokens without a whole character, the bytes will not become one.
_LONGEST = 16


def special_tokens(tokenizer: Any) -> FrozenSet[int]:
    """Returns the tokens that are no text: those that the tokenizer has a use for, and others added as special."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {place for place, token in added if token.special}


class TextDecoder:
    """The tokens of one tokenizer as text. Special tokens, and ids that the tokenizer does not have, have none.

    Made once, as it goes through the vocabulary.

    Args:
        tokenizer: As load_tokenizer returns it.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._size = tokenizers.vocabulary_size(tokenizer)
        # Decoded behind this, a token keeps the space that decoders take from the first one.
        self._before = tokenizers.encode(tokenizer, "a")
        self._before_text = self._decoded(self._before)

    def has_text(self, token: int) -> bool:
        """Returns whether a token can have a text."""
        return 0 <= token < self._size and token not in self._special

    def decode(self, tokens: Sequence[int], first: bool = True) -> str:
        """Returns the text of tokens.

        Args:
            tokens (sequence of int): Any ids.
            first (bool): Whether a text begins with them, so that the space before its first word is left out. Default:
                True.
        """
        shown = [token for token in tokens if self.has_text(token)]
        return self._decoded(shown) if first else self._decoded(self._before + shown)[len(self._before_text) :]

    def _decoded(self, tokens):
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one answer. All pieces together are what decoding all tokens at once gives after the prompt.

    Only the tokens since the last whole character are decoded. Where a tokenizer falls back to bytes one by one, bytes
    that are not UTF-8 make all of the run that they are in unreadable when it is decoded at once; here, the characters
    before them have been given.

    Args:
        decoder (TextDecoder): Of the tokenizer.
        prompt (sequence of int): Tokens before the answer, up to the end of a character.
    """

    def __init__(self, decoder: TextDecoder, prompt: Sequence[int]):
        self._decoder = decoder
        self._first = not any(decoder.has_text(token) for token in prompt)
        self._pending: List[int] = []
        self._given = 0

    def add(self, token: int) -> str:
        """Returns the text that is final with one more token, often the token's own; may be empty."""
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
        """Returns what of the text of the first ``count`` tokens has not been given, and forgets them."""
        piece = text[self._given :]
        self._first = self._first and not count
        self._given = max(0, self._given - len(text))
        del self._pending[:count]
        return piece
