"""Communication among a run's processes outside the train step: bytes, gathered or summed bit for bit, and sums."""

from typing import Callable, List, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, get_rank

from mindlora.core.errors import BackendError

# The value of set_rank_count.
_count = 1


def all_gather(content: np.ndarray) -> np.ndarray:
    """Gathers uint8 [n], with the same n on all ranks, from every rank by AllGather: uint8 [ranks, n].

    Raises BackendError if the device has no such operator, or the operator moves no data.
    """
    # Gathered as int32, which every backend supports; none gathers bytes.
    words = np.frombuffer(content.tobytes() + bytes(-content.size % 4), np.int32)
    gathered = _run("AllGather", ops.AllGather, words)
    rows = gathered.view(np.uint8).reshape(get_group_size(), -1)[:, : content.size]
    if not np.array_equal(rows[get_rank()], content):
        raise BackendError(
            "AllGather gives back other bytes than this rank has sent, as in a dry run (MS_SIMULATION_LEVEL), where it "
            "moves no data. Run on devices."
        )
    return rows


def all_sum(content: np.ndarray) -> np.ndarray:
    """Joins the bytes of all ranks by AllReduce; each place belongs to only one rank.

    Input and output are uint8 [n], with the same n on all ranks; ``content`` is 0 in other ranks' places. Raises
    BackendError if the device has no such operator.
    """
    # Two bytes become an integer in float32, whose sum with zeros is exact even if the bytes encode NaN or -0.0.
    halves = np.frombuffer(content.tobytes() + bytes(content.size % 2), np.uint16).astype(np.float32)
    return _run("AllReduce", ops.AllReduce, halves).astype(np.uint16).view(np.uint8)[: content.size]


def share(text: bytes) -> List[bytes]:
    """Returns the text of every rank, in rank order; all ranks must call this."""
    sizes = all_gather(np.array([len(text)], np.int64).view(np.uint8)).copy().view(np.int64)[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [row[:size].tobytes() for row, size in zip(all_gather(padded), sizes)]


def value_of(rank: int, value: float) -> float:
    """Returns one rank's ``value`` on every rank; -1 is the last rank. All ranks must call this."""
    content = np.array([value], np.float64).view(np.uint8)
    return float(all_gather(content)[rank].copy().view(np.float64)[0])


def rank_and_count() -> Tuple[int, int]:
    """Returns this process's rank, and the number of ranks."""
    return get_rank(), get_group_size()


def set_rank_count(count: int) -> None:
    """Sets the number of data-parallel processes, for when MindSpore's parallel mode does not say it."""
    global _count
    _count = count


def rank_count() -> int:
    """Returns the number of data-parallel processes: 1 for a single process and in any other parallel mode."""
    return get_group_size() if ms.get_auto_parallel_context("parallel_mode") == "data_parallel" else _count


def sum_over_ranks(values: Sequence[float]) -> np.ndarray:
    """Returns the sums of the ranks' values, in float32, the same on every rank; all ranks must call this."""
    return np.array(values) if rank_count() == 1 else ops.AllReduce()(Tensor(np.array(values, np.float32))).asnumpy()


def mean_over_ranks(value: float) -> float:
    """Returns the mean of the ranks' values, the same on every rank; all ranks must call this."""
    count = rank_count()
    return value if count == 1 else float(sum_over_ranks([value / count])[0])


def wait_for_all_ranks() -> None:
    """Returns when every rank has called this."""
    mean_over_ranks(0.0)


def _run(name: str, operator: Callable, content: np.ndarray) -> np.ndarray:
    try:
        return operator()(Tensor(content)).asnumpy()
    except (RuntimeError, TypeError, ValueError) as error:
        first = (str(error).strip() or repr(error)).splitlines()[0].rstrip(".!")
        raise BackendError(
            f"{name} of {content.dtype} cannot run on this device or in this mode: {first}. Use another device or mode."
        ) from error
