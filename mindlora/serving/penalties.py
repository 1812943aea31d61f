"""Penalties: the logits of tokens that occurred already, made smaller."""

from typing import Sequence

import numpy as np

from mindlora.serving.request import Sampling


class Penalties:
    """The penalties of one request.

    The repetition penalty r counts the prompt's tokens too: a logit above 0 becomes logit / r, another logit * r
    (Keskar et al., CTRL, 2019, as transformers and vLLM have it). From the logit of a token that was generated n >= 1
    times, presence + n * frequency is subtracted then (OpenAI).

    Args:
        sampling (Sampling): What the request asks for.
        prompt (sequence of int): Its prompt.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]):
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._prompt = np.unique(np.asarray(prompt, np.int64))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0

    def apply(self, logits: np.ndarray, generated: Sequence[int]) -> np.ndarray:
        """Returns the logits after the penalties, as a new array.

        Args:
            logits (numpy.ndarray): float32 [vocabulary].
            generated (sequence of int): The tokens that were generated so far.
        """
        logits = logits.copy()
        tokens, counts = np.unique(np.asarray(generated, np.int64), return_counts=True)
        if self._repetition != 1.0:
            seen = np.union1d(self._prompt, tokens)
            values = logits[seen]
            logits[seen] = np.where(values < 0, values * self._repetition, values / self._repetition)
        logits[tokens] -= self._presence + self._frequency * counts
        return logits
