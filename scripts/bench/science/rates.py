"""The search for the best learning rate, and what a few seeds tell."""

import math
import statistics
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

# Half the width of a 95 % interval of a mean in standard errors, by how many seeds there are (Student, 1908).
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
# How often a search goes on to the next rate.
MOVES = 6
# How many seeds a search trains at each rate.
SEARCHING = 2
LOWER, HIGHER, NOT_TOLD_APART = "lower", "higher", "not told apart"


class Difference(NamedTuple):
    """The mean over seeds of a paired difference, and the interval that holds it with 95 %."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the first side is lower or higher than the second."""
        if self.low <= 0 <= self.high:
            return NOT_TOLD_APART
        return LOWER if self.mean < 0 else HIGHER


def difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Returns the difference of two sides that had the same seeds; one seed tells nothing apart."""
    differences = [a - b for a, b in zip(first, second)]
    mean = statistics.mean(differences)
    if len(differences) == 1:
        return Difference(mean, -math.inf, math.inf)
    half = STUDENT[len(differences)] * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half)


def where_reached(losses: Sequence[float], values: Sequence[float], goal: float) -> Optional[float]:
    """Returns the value beside the loss at which a curve first reaches a goal, between two measurements by a line.

    None if it does not reach it.
    """
    points = list(zip(losses, values))
    for (loss, value), (next_loss, next_value) in zip(points, points[1:]):
        if next_loss <= goal:
            return value + (next_value - value) * (loss - goal) / (loss - next_loss)
    return None


class Sweep:
    """The losses of trainings over learning rates, which are powers of two, and seeds.

    The first SEARCHING seeds search for the best rate. The others are trained where they are asked for.
    """

    def __init__(self, loss_of: Callable[[float, int], float], seeds: Sequence[int]):
        self.loss_of = loss_of
        self.seeds = seeds
        self.losses: Dict[float, List[float]] = {}

    def at(self, rate: float, count: Optional[int] = None) -> List[float]:
        """Returns the losses of all seeds, or of the first ones, at a rate; trains those that nobody has asked for."""
        found = self.losses.setdefault(rate, [])
        for seed in self.seeds[len(found) : count]:
            found.append(self.loss_of(rate, seed))
        return found[:count]

    def mean(self, rate: float) -> float:
        """Returns the mean loss of the seeds that search."""
        mean = statistics.mean(self.at(rate, SEARCHING))
        return mean if math.isfinite(mean) else math.inf

    def search(self, rate: float, moves: int = MOVES) -> "Sweep":
        """Goes downhill from a rate until both its half and its double are worse."""
        for _ in range(moves + 1):
            best = min((rate, rate / 2, rate * 2), key=self.mean)
            if best == rate:
                break
            rate = best
        return self

    @property
    def best(self) -> float:
        """The rate of the least mean loss."""
        return min(self.losses, key=self.mean)

    @property
    def best_losses(self) -> List[float]:
        """The loss of each seed at the best rate."""
        return self.at(self.best)

    @property
    def is_enclosed(self) -> bool:
        """Whether the half and the double of the best rate were tried too."""
        return {self.best / 2, self.best * 2} <= set(self.losses)

    def optimum(self, seed: int) -> float:
        """Returns the rate at the lowest point of the parabola through a seed's losses at the best rate and beside it.

        The parabola is over the logarithm of the rate.
        """
        number = list(self.seeds).index(seed)
        if not self.is_enclosed:
            return self.best
        low, middle, high = (self.at(self.best * factor)[number] for factor in (0.5, 1, 2))
        curvature = low - 2 * middle + high
        if not curvature > 0:
            return self.best
        shift = 0.5 * (low - high) / curvature
        return self.best * 2 ** max(-1.0, min(1.0, shift))
