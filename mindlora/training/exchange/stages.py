"""The density of an exchange over the steps: it falls in a few stages, each of which has one shape."""

import math
from typing import List, Tuple

_RATIO = 4


def density_stages(density: float, warmup_steps: int) -> List[Tuple[int, float]]:
    """Returns the stages (first step, density): 1, 1/4, 1/16 ... as long as that is above ``density``, then this.

    The stages of the warm-up share ``warmup_steps`` as evenly as whole steps allow. Few stages, as every one has shapes
    of its own, for which a branch of the graph is compiled at the start; none is compiled later. (Warm-up from Deep
    Gradient Compression, Lin et al. 2018, whose density falls by 4 in each epoch.)

    Args:
        density (float): The share of the elements that is sent after the warm-up, in (0, 1].
        warmup_steps (int): Steps of the warm-up; 0 for none.

    Returns:
        list of (int, float), the first one from step 0.
    """
    count = math.ceil(round(math.log(1 / density, _RATIO), 9))
    if not warmup_steps or not count:
        return [(0, density)]
    stages = {warmup_steps * number // count: float(_RATIO) ** -number for number in range(count)}
    return [*stages.items(), (warmup_steps, density)]
