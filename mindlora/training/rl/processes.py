"""The processes of a run that learns from rewards: each answers and rates its part of the prompts of a step."""

import contextlib
from typing import Iterator

import numpy as np

from mindlora.core import errors
from mindlora.core.errors import LoraError
from mindlora.training.resume.collectives import all_gather, rank_and_count, rank_count, share


class Processes:
    """The exchange of arrays and errors between a run's processes. All of them must call the same, in the same order.

    Attributes:
        rank (int): The number of this process.
        count (int): The number of processes that train in data parallel; 1 if this one is alone.
    """

    def __init__(self) -> None:
        self.rank, self.count = (0, 1) if rank_count() == 1 else rank_and_count()

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Returns the rows of all processes, rank 0's first; each process has the same number of rows."""
        if self.count == 1:
            return values
        content = np.ascontiguousarray(values)
        gathered = all_gather(content.reshape(-1).view(np.uint8))
        return np.ascontiguousarray(gathered).view(content.dtype).reshape(-1, *content.shape[1:])

    def own(self, values: np.ndarray) -> np.ndarray:
        """Returns this process's part of the rows of all processes."""
        each = len(values) // self.count
        return values[self.rank * each : (self.rank + 1) * each]

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """Within this, the LoraError of one process is raised in all of them, with the rank of that process."""
        if self.count == 1:
            yield
            return
        failure = None
        try:
            yield
        except LoraError as error:
            failure = error
        failed = failure is not None
        if not self.gather(np.array([failed])).any():
            return
        texts = share(f"{type(failure).__name__} {failure}".encode() if failed else b"")
        rank, text = next((rank, text.decode()) for rank, text in enumerate(texts) if text)
        kind, _, message = text.partition(" ")
        raise getattr(errors, kind)(f"rank {rank}: {message}") from failure
