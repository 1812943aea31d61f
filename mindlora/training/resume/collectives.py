"""What all processes of a run tell each other outside the train step: bytes, gathered or summed bit for bit; sums."""

from typing import Callable, List, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import get_group_size, get_rank

from mindlora.core.errors import BackendError

# What set_rank_count has set.
_count = 1


def all_gather(content: np.ndarray) -> np.ndarray:
    """Returns what every rank holds, uint8 [ranks, n], of uint8 [n] with the same n on all ranks: by AllGather.

    Raises BackendError if the device has no such operator, or the operator moves no data.
    """
    # As int32, which every backend gathers; bytes are gathered on none.
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
    """Returns the bytes of all ranks put together, where at each place only one rank has any: by AllReduce.

    Both are uint8 [n], with the same n on all ranks; ``content`` is 0 where it is another rank's turn. Raises
    BackendError if the device has no such operator.
    """
    # Two bytes become a whole number in float32, whose sum with zeros is exact, also for NaN and -0.0.
    halves = np.frombuffer(content.tobytes() + bytes(content.size % 2), np.uint16).astype(np.float32)
    return _run("AllReduce", ops.AllReduce, halves).astype(np.uint16).view(np.uint8)[: content.size]


def share(text: bytes) -> List[bytes]:
    """Returns the text of every rank, in the order of the ranks; all of them must call this."""
    sizes = all_gather(np.array([len(text)], np.int64).view(np.uint8)).copy().view(np.int64)[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return [row[:size].tobytes() for row, size in zip(all_gather(padded), sizes)]


def value_of(rank: int, value: float) -> float:
    """Returns what one rank has as ``value``, on every rank; -1 is the last. All of them must call this."""
    content = np.array([value], np.float64).view(np.uint8)
    return float(all_gather(content)[rank].copy().view(np.float64)[0])


def rank_and_count() -> Tuple[int, int]:
    """Returns this process's rank, and how many there are."""
    return get_rank(), get_group_size()


def set_rank_count(count: int) -> None:
    """Sets how many processes train in data parallel where MindSpore's parallel mode does not say it."""
    global _count
    _count = count


def rank_count() -> int:
    """Returns how many processes train in data parallel: 1 alone, and 1 in any other parallel mode."""
    return get_group_size() if ms.get_auto_parallel_context("parallel_mode") == "data_parallel" else _count


def sum_over_ranks(values: Sequence[float]) -> np.ndarray:
    """Returns the sums of the ranks' values, in float32, the same on every rank; all of them must call this."""
    return np.array(values) if rank_count() == 1 else ops.AllReduce()(Tensor(np.array(values, np.float32))).asnumpy()


def mean_over_ranks(value: float) -> float:
    """Returns the mean of the ranks' values, which is the same number on every rank; all of them must call this."""
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
