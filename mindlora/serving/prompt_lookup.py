"""Prompt lookup: guesses how an answer goes on from what followed its last tokens where they came before."""

from typing import Dict, List, Sequence, Tuple

# So many last tokens are looked for in the text before them, the longest run first.
_RUNS = (3, 2)


class PromptLookup:
    """Guesses the next tokens of one text, its prompt and the answer so far (Saxena, Prompt Lookup Decoding, 2023).

    The guess is what followed the last tokens at the last place where they came before. Where it reaches the end of
    the text, it goes on through itself, as a text does that repeats itself (Ziv and Lempel, 1977).

    A guess has up to ``most`` tokens, and not more than one above twice those that were right in the guess before: in
    a text that copies nothing, one token is guessed in vain.
    """

    def __init__(self, most: int):
        self._most = most
        self._limit = most
        # Runs of tokens -> the index of what followed each where it came last.
        self._next: Dict[Tuple[int, ...], int] = {}
        self._indexed = 0

    def guess(self, tokens: Sequence[int], room: int) -> List[int]:
        """Returns what may follow a text, at most ``room`` tokens; each text begins with the one before."""
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
        """Takes note how many tokens of the last guess were right."""
        self._limit = min(self._most, 2 * right + 1)


def _continued(tokens: Sequence[int], begin: int, count: int) -> List[int]:
    """Returns the ``count`` tokens from ``begin`` on of the text that goes on as it went there."""
    guessed = list(tokens[begin : begin + count])
    while len(guessed) < count:
        guessed.append(guessed[len(guessed) - (len(tokens) - begin)])
    return guessed
