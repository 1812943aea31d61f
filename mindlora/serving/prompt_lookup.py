"""Prompt lookup: guesses an answer's next tokens from those that followed its last tokens earlier in the text."""

from typing import Dict, List, Sequence, Tuple

# How many last tokens are searched for in the text before them, the longest run first.
_RUNS = (3, 2)


class PromptLookup:
    """Guesses the next tokens of one text, its prompt and the answer so far (Saxena, Prompt Lookup Decoding, 2023).

    The guess is what followed the last tokens at their latest earlier occurrence. If it reaches the end of
    the text, it continues through itself, as a text that repeats itself does (Ziv and Lempel, 1977).

    A guess has up to ``most`` tokens, and at most one more than twice the right ones of the previous guess: in
    a text without repetitions, one token is guessed in vain.
    """

    def __init__(self, most: int):
        self._most = most
        self._limit = most
        # Run of tokens -> index of the token after its last occurrence.
        self._next: Dict[Tuple[int, ...], int] = {}
        self._indexed = 0

    def guess(self, tokens: Sequence[int], room: int) -> List[int]:
        """Returns a guess of a text's continuation, at most ``room`` tokens; each text begins with the previous one."""
        for end in range(self._indexed, len(tokens)):
            for run in _RUNS:
                if run <= end:
                    self._next[tuple(tokens[end - run : end])] = end
        self._indexed = len(tokens)
        count = min(self._limit, room)
        for run in _RUNS:
            begin = self._next.get(tuple(tokens[-run:]))
            if begin is not None and run <= len(tokens):
                return _continued(tokens, begin, count)
        return []

    def note(self, right: int) -> None:
        """Records how many tokens of the last guess were right."""
        self._limit = min(self._most, 2 * right + 1)


def _continued(tokens: Sequence[int], begin: int, count: int) -> List[int]:
    """Returns the ``count`` tokens from ``begin`` on of the text continued by its own repetition."""
    guessed = list(tokens[begin : begin + count])
    while len(guessed) < count:
        guessed.append(guessed[len(guessed) - (len(tokens) - begin)])
    return guessed
