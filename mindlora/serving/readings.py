"""Readings of given texts: hidden states and the scores of heads, for requests that ask for them."""

from typing import Dict, Optional, Sequence

import numpy as np

from mindlora.core.errors import ServingError
from mindlora.serving.request import Part, Request
from mindlora.serving.runner import ModelRunner
from mindlora.serving.score_head import misuse


def read_texts(runner: ModelRunner, parts: Sequence[Part]) -> Dict[Request, ServingError]:
    """Fills vectors of requests from the last step of ``runner``, which had these parts.

    Returns the requests that fail, with the reason: their adapter has another purpose, or numbers are not finite.
    """
    failed: Dict[Request, ServingError] = {}
    first = 0
    for part in parts:
        request = part.request
        reading = request.sampling.reading
        head = runner.score_head(request.slot)
        problem = misuse(request.adapter, head, reading is not None and reading.scores)
        if problem is None and part.reads:
            hidden = runner.hidden_at([first + index - part.start for index in part.reads])
            vectors = head.scores(hidden) if head is not None else hidden
            request.vectors.update(zip(part.reads, vectors))
            if not np.isfinite(vectors).all():
                problem = ServingError(
                    f"The text gives numbers that are not finite, with {request.adapter or 'the base'}."
                )
        if problem is not None:
            failed[request] = problem
        first += len(part.tokens)
    return failed


def vectors_of(request: Request) -> Optional[np.ndarray]:
    """Returns float32 [tokens, width], in the order of the tokens; None unless requested."""
    if request.sampling.reading is None:
        return None
    return np.stack([request.vectors[index] for index in sorted(request.vectors)])
