"""TokenTexts: single tokens as text, as bytes, and as reports of log-probabilities name them."""

import contextlib
import functools
import re
from typing import Any, Dict, Iterable, Tuple

from mindlora.serving.detokenizer import REPLACEMENT, TextDecoder


class TokenTexts:
    """Texts of single tokens, their spaces included; the tokenizer names special ones, which have no text.

    ``text`` returns the text of a token, with U+FFFD for what is not a whole character.
    """

    def __init__(self, decoder: TextDecoder, tokenizer: Any):
        # Not above: whoever has a tokenizer has it already, and others would wait for it.
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._decoder = decoder
        self._tokenizer = tokenizer
        self._byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self.text = functools.lru_cache(maxsize=65536)(self._text)

    def data(self, token: int) -> bytes:
        """Returns what a token adds to a text, in UTF-8; of a part of a character, its bytes."""
        if not self._decoder.has_text(token):
            return b""
        text = self._decoder.decode([token], first=False)
        return self._stored(token, text) if REPLACEMENT in text else text.encode("utf-8")

    def name(self, token: int) -> str:
        r"""Returns the text of a token; of one with a part of a character its bytes, as OpenAI has them: bytes:\xe6."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return text
        data = self.data(token)
        return text if data == text.encode("utf-8") else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def named(self, values: Iterable[Tuple[int, float]]) -> Dict[str, float]:
        """Returns the values of tokens by their names; a second token of the same name is called token_id:NUMBER."""
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
        """Returns the bytes of a token as the vocabulary has them: in characters that stand for bytes, or as <0xE6>."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        fallback = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        if all(character in self._byte_of for character in piece):
            return bytes(self._byte_of[character] for character in piece)
        return text.encode("utf-8")
