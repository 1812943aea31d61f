"""Stopping: where an answer ends, and which of its text can be sent already."""

import logging
from typing import Any, FrozenSet, Iterable, List, Optional, Sequence, Tuple, Union

from mindlora.data import tokenizers
from mindlora.errors import RequestError
from mindlora.serving.detokenizer import Detokenizer, special_tokens
from mindlora.serving.request import Sampling

logger = logging.getLogger("mindlora")


def end_tokens(tokenizer: Any, configured: Union[int, Sequence[int], None] = None) -> FrozenSet[int]:
    """Returns the tokens that end an answer: the tokenizer's eos, and those of the model's configuration.

    Args:
        tokenizer: As load_tokenizer returns it.
        configured (int, sequence of int or None): eos_token_id of the configuration. An id that is an ordinary token of
            this tokenizer is left out with a warning: MindFormers' default, 2, is a character in many vocabularies.
    """
    given = [configured] if isinstance(configured, int) else list(configured or [])
    special, size = special_tokens(tokenizer), tokenizers.vocabulary_size(tokenizer)
    for token in given:
        if token not in special and 0 <= token < size:
            logger.warning(
                "eos_token_id %s of the configuration is the text %r of the tokenizer: answers do not end with it.",
                token,
                tokenizer.convert_ids_to_tokens(token),
            )
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset(own) | (frozenset(given) & special)


class Stopping:
    """Makes text of one answer's tokens, up to its end.

    An answer ends with an end token or the first stop string that is complete ("stop"), or with max_tokens or the
    model's window ("length"). Neither end tokens nor stop strings are part of the text. What could be the beginning of
    a stop string is held back until that is decided.

    Args:
        sampling (Sampling): Its max_tokens, stop, stop_tokens and ignore_eos count here.
        detokenizer (Detokenizer): Of this answer.
        ends (frozenset of int): See end_tokens.
        room (int): Tokens that the window has behind the prompt.

    Raises:
        RequestError: A stop string is empty.
    """

    def __init__(self, sampling: Sampling, detokenizer: Detokenizer, ends: FrozenSet[int], room: int):
        if not all(isinstance(stop, str) and stop for stop in sampling.stop):
            raise RequestError("stop has an entry that is not a text, or is empty: leave it out.")
        self._detokenizer = detokenizer
        self._ends = (frozenset() if sampling.ignore_eos else ends) | frozenset(sampling.stop_tokens)
        self._left = min(sampling.max_tokens, room)
        self._matcher = StopMatcher(sampling.stop)

    def add(self, token: int) -> Tuple[str, Optional[str]]:
        """Takes the next token.

        Returns:
            (str, str or None): The text that can be sent now, perhaps empty; "stop" or "length" if the answer has
            ended, and then the text is the rest of it.
        """
        self._left -= 1
        ended = token in self._ends
        text = "" if ended else self._detokenizer.add(token)
        if ended or not self._left:
            text += self._detokenizer.finish()
        text, stopped = self._matcher.add(text)
        if stopped:
            return text, "stop"
        if ended or not self._left:
            return text + self._matcher.finish(), "stop" if ended else "length"
        return text, None


class StopMatcher:
    """Finds stop strings in a text that comes in pieces; the answer does not depend on how it is cut into pieces.

    Args:
        stops (iterable of str): None of them empty.
    """

    def __init__(self, stops: Iterable[str]):
        self._stops: List[str] = list(stops)
        self._longest = max(map(len, self._stops), default=1)
        self._held = ""

    def add(self, piece: str) -> Tuple[str, bool]:
        """Takes the next piece.

        Returns:
            (str, bool): The text that is decided, and whether a stop string followed it: the one that was complete
            first, the longest if several were.
        """
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops for at in [text.find(stop)] if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        begin = next((at for at in self._open(text) if self._begins(text[at:])), len(text))
        self._held = text[begin:]
        return text[:begin], False

    def finish(self) -> str:
        """Returns what was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _open(self, text):
        """Returns the places at which a stop string could begin that is not complete."""
        return range(max(0, len(text) - self._longest + 1), len(text))

    def _begins(self, text):
        return any(stop.startswith(text) for stop in self._stops)
