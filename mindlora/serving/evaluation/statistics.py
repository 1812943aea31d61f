"""Statistics of small samples: values with intervals, and paired differences of adapters from their base."""

import dataclasses
from typing import Callable, Dict, Mapping, Optional

import numpy as np

# Number of resamples, and the share of them that an interval leaves out on each side.
RESAMPLES = 2000
_TAIL = 2.5
# By chance, five examples in a row all agree in one of 16 cases: they never distinguish two models at 95 %.
LEAST_EXAMPLES = 6

BETTER, WORSE, NOT_TOLD_APART = "better", "worse", "not told apart"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value, and the interval that holds 95 % of its resamples; None with fewer than LEAST_EXAMPLES examples."""

    value: float
    low: Optional[float] = None
    high: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Measure:
    """One measure of a base and its adapters on the same examples.

    Attributes:
        name (str): Its name, such as "perplexity".
        source (str): The file on which it was measured.
        examples (int): How many examples (windows, rows, questions, samples) were resampled.
        smaller_is_better (bool): Whether a smaller value is a better one.
        values (dict): Name -> Estimate: BASE and the adapters.
        differences (dict): Name of an adapter -> Estimate of its value minus the base's, on the same resamples.
        verdicts (dict): Name of an adapter -> BETTER, WORSE or NOT_TOLD_APART.
    """

    name: str
    source: str
    examples: int
    smaller_is_better: bool
    values: Dict[str, Estimate]
    differences: Dict[str, Estimate]
    verdicts: Dict[str, str]


# Reports' name of the base.
BASE = "base"


def measure(
    name: str,
    source: str,
    smaller_is_better: bool,
    amounts: Mapping[Optional[str], np.ndarray],
    weights: np.ndarray,
    transform: Callable[[np.ndarray], np.ndarray] = lambda mean: mean,
    seed: int = 0,
) -> Measure:
    r"""Returns a measure, v = transform(sum_i amount_i / sum_i weight_i), of each model, with bootstrap intervals.

    The examples i are resampled with replacement, RESAMPLES times and for all models alike (paired): the interval of a
    value, or of a difference to the base's, is from its 2.5th to its 97.5th percentile. An adapter is better or worse
    if the interval of its difference excludes 0.

    Args:
        amounts (mapping): Model -> float64 [n], a number for each example; None is the base.
        weights (array): float64 [n], a weight for each example; their sum is above 0.
        transform (callable): An increasing elementwise function. Default: the identity.
        seed (int): Seed of the resamples.

    Source: Efron, Bootstrap Methods: Another Look at the Jackknife, 1979; Koehn, Statistical Significance Tests for
    Machine Translation Evaluation, 2004.
    """
    draws = np.vstack([np.ones(len(weights)), _draws(len(weights), seed)])
    # Row 0 has every example once: the value itself.
    curves = {model: transform(draws @ amount / (draws @ weights)) for model, amount in amounts.items()}
    base = curves[None]
    differences = {model: _estimate(curve - base) for model, curve in curves.items() if model is not None}
    return Measure(
        name=name,
        source=source,
        examples=len(weights),
        smaller_is_better=smaller_is_better,
        values={model or BASE: _estimate(curve) for model, curve in curves.items()},
        differences=differences,
        verdicts={model: _verdict(difference, smaller_is_better) for model, difference in differences.items()},
    )


def _draws(count: int, seed: int) -> np.ndarray:
    """Returns how often each resample has each example, [RESAMPLES, count]; None with too few examples."""
    if count < LEAST_EXAMPLES:
        return np.zeros((0, count))
    return np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)


def _estimate(curve: np.ndarray) -> Estimate:
    if len(curve) == 1:
        return Estimate(float(curve[0]))
    low, high = np.percentile(curve[1:], [_TAIL, 100 - _TAIL])
    return Estimate(float(curve[0]), float(low), float(high))


def _verdict(difference: Estimate, smaller_is_better: bool) -> str:
    if difference.low is None or difference.high is None or difference.low <= 0 <= difference.high:
        return NOT_TOLD_APART
    return BETTER if (difference.value < 0) == smaller_is_better else WORSE
