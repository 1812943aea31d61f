"""FairQueue: fair turns among requests that wait for different adapters."""

import collections
import heapq
from typing import Deque, Dict, Iterator, Optional, Tuple

from mindlora.serving.request import Request


class Line:
    """The requests, at least one, that wait for an adapter, or for the base if it is None; first come, first served.

    Attributes:
        refused (bool): Its turn came while the adapter was not ready.
        overtaken (int): Requests of other adapters that were admitted while this line was the first that lacked nothing
            but a slot.
    """

    def __init__(self, adapter: Optional[str]):
        self.adapter = adapter
        self.requests: Deque[Request] = collections.deque()
        self.refused = False
        self.overtaken = 0

    @property
    def first(self) -> Request:
        """The oldest request."""
        return self.requests[0]


class FairQueue:
    """Waiting requests, in an order that is fair between adapters.

    Service is counted in tokens: prompts' tokens that were not in the cache when the request was admitted, and tokens
    that were generated. The adapter with the least service has the turn, and among equals the one whose first
    request came first. An idle adapter resumes with at least the service of the last one that had a turn,
    so that being idle earns nothing. This is start-time fair queueing (Goyal, Vin and Cheng, 1996) with the virtual
    token counters of Sheng et al., Fairness in Serving Large Language Models, 2024. Of two adapters that always
    wait and are ready, neither gets ahead of the other by more than one prompt and the answers of the requests that
    run together.

    An adapter that is not ready when its turn comes is skipped and keeps its turn: from then on it is tried first
    in each step, the longest waiting one before the others. So the next free slot goes to the longest waiting
    adapter. Requests of adapters with slots continue in the meantime, but those of a popular adapter could hold its
    slot forever. Hence, once ``patience`` of them have overtaken the longest waiting adapter that lacks only a
    slot, only the base, which needs no slot, is admitted until the adapter has a slot.

    Args:
        patience (int): Requests that may overtake an adapter that waits for a slot.
    """

    def __init__(self, patience: int):
        self.patience = patience
        self._lines: Dict[Optional[str], Line] = {}
        self._service: Dict[Optional[str], int] = {}
        self._turn = 0  # the service at which the last turn was given
        self._size = 0
        # The longest waiting line of this round that lacks only a slot.
        self._slotless: Optional[Line] = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return (request for line in self._lines.values() for request in line.requests)

    def service(self, adapter: Optional[str]) -> int:
        """Returns the service that is counted for an adapter, in tokens."""
        return self._service.get(adapter, 0)

    def push(self, request: Request) -> None:
        """Puts a request at the end of its adapter's line."""
        line = self._lines.get(request.adapter)
        if line is None:
            line = self._lines[request.adapter] = Line(request.adapter)
            self._raise(request.adapter)
        line.requests.append(request)
        self._size += 1

    def remove(self, request: Request) -> None:
        """Removes a request, wherever it is in its line."""
        line = self._lines[request.adapter]
        line.requests.remove(request)
        self._size -= 1
        if not line.requests:
            del self._lines[request.adapter]

    def charge(self, adapter: Optional[str], tokens: int) -> None:
        """Counts service for an adapter."""
        self._service[adapter] = self._service.get(adapter, 0) + tokens

    def turns(self) -> Iterator[Line]:
        """Yields the lines in the order of their turns.

        After each, the caller reports the fate of its first request with admit(), refuse() or remove(). A line that
        was not refused and has more requests comes again at its next turn.
        """
        self._slotless = None
        for line in sorted((line for line in self._lines.values() if line.refused), key=lambda line: line.first.number):
            first = line.first
            yield line
            if line.requests and line.first is not first:
                line.refused = False  # it had its turn
            if self._slotless:
                break  # no slot is free for the others either
        heap = [self._place(line) for line in self._lines.values() if not line.refused]
        heapq.heapify(heap)
        while heap:
            line = heapq.heappop(heap)[-1]
            if line.adapter is not None and self._slotless and self._slotless.overtaken >= self.patience:
                continue
            first = line.first
            yield line
            if line.requests and line.first is not first:
                heapq.heappush(heap, self._place(line))

    def admit(self, line: Line, tokens: int) -> None:
        """Removes a line's first request, which runs from now on; ``tokens`` of its prompt are not in the cache."""
        if line.refused:
            self._raise(line.adapter)  # waiting for a slot earns a turn, but no more
        self._turn = max(self._turn, self._service[line.adapter])
        self.charge(line.adapter, tokens)
        line.refused = False
        line.overtaken = 0
        self.remove(line.first)
        if line.adapter is not None and self._slotless:
            self._slotless.overtaken += 1

    def refuse(self, line: Line, lacks_slot: bool) -> None:
        """Skips a line whose adapter is not ready.

        ``lacks_slot`` says that the adapter lacks only a slot, since others use them all.
        """
        line.refused = True
        if lacks_slot and self._slotless is None:
            self._slotless = line

    def _raise(self, adapter: Optional[str]) -> None:
        self._service[adapter] = max(self._turn, self._service.get(adapter, 0))

    def _place(self, line: Line) -> Tuple[int, int, Line]:
        return self._service[line.adapter], line.first.number, line
