"""The log-probabilities of the tokens of prompts, for requests that ask how likely a given text is."""

from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import ServingError
from mindlora.serving.network import FEW_TOKENS
from mindlora.serving.request import Part, Request
from mindlora.serving.runner import ModelRunner
from mindlora.serving.sampling import Sampled, score_token


def score_prompts(runner: ModelRunner, parts: Sequence[Part]) -> Dict[Request, ServingError]:
    """Fills prompt_logprobs of requests from the step that ``runner`` has computed last, of these parts.

    The logits exist for FEW_TOKENS tokens at a time. Returns the requests that fail, with the reason.
    """
    wanted = _wanted(parts)
    failed: Dict[Request, ServingError] = {}
    for begin in range(0, len(wanted), FEW_TOKENS):
        chunk = wanted[begin : begin + FEW_TOKENS]
        logits = runner.logits_after([row for row, _, _ in chunk])
        for row_logits, (_, request, index) in zip(logits, chunk):
            try:
                request.prompt_logprobs[index] = _score(request, index, row_logits)
            except ServingError as error:
                failed[request] = error
    return failed


def scores_of(request: Request) -> Optional[List[Sampled]]:
    """Returns one for each token of a prompt, without a log-probability before scored_from; None if not asked."""
    if request.sampling.prompt_logprobs is None:
        return None
    return [request.prompt_logprobs.get(index, Sampled(token)) for index, token in enumerate(request.prompt)]


def _wanted(parts: Sequence[Part]) -> List[Tuple[int, Request, int]]:
    """Returns which token of the step tells of which token of which prompt."""
    wanted = []
    first = 0
    for part in parts:
        wanted += [(first + index - 1 - part.start, part.request, index) for index in part.scores]
        first += len(part.tokens)
    return wanted


def _score(request: Request, index: int, logits: np.ndarray):
    return score_token(request.prompt[index], logits, request.sampling.prompt_logprobs, request.adapter)
