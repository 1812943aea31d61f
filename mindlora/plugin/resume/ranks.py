"""What the processes of a data-parallel run tell each other outside the train step."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import get_group_size


def rank_count() -> int:
    """Returns how many processes train in data parallel: 1 alone, and 1 in any other parallel mode."""
    return get_group_size() if ms.get_auto_parallel_context("parallel_mode") == "data_parallel" else 1


def mean_over_ranks(value: float) -> float:
    """Returns the mean of the ranks' values, which is the same number on every rank; all of them must call this."""
    count = rank_count()
    if count == 1:
        return value
    return float(ops.AllReduce()(Tensor(np.array([value / count], np.float32))).asnumpy()[0])


def wait_for_all_ranks() -> None:
    """Returns when every rank has called this."""
    mean_over_ranks(0.0)
