"""Scheduler: which requests run, and what each step computes for them."""

import collections
import dataclasses
import itertools
import time
from typing import Deque, Hashable, Iterator, List, Optional, Sequence, Tuple

from mindlora.core.errors import LoraError, QueueFullError, RequestError
from mindlora.serving.adapter_slots import AdapterSlots
from mindlora.serving.blocks import BlockPool
from mindlora.serving.fairness import FairQueue
from mindlora.serving.request import Part, PromptLookup, Request, State


class Scheduler:
    """Continuous batching: requests join and leave between any two steps.

    A step computes, within ``max_tokens_per_step``: first the next token of each running request whose prompt is
    computed; then chunks of prompts, so that a long prompt delays no other request's next token by more than one chunk
    (Agrawal et al., Sarathi, 2023). Of the tokens left for prompts, the oldest takes half if others need them too, the
    next one half of the rest, and so on: a short prompt need not wait for a long one to finish.

    Blocks in which an adapter does not act yet (aLoRA) are the base's: all such adapters share them with it.

    Waiting requests are admitted in FairQueue's order while there are blocks for all tokens of running requests,
    and one more for each: prompts never hold blocks while waiting for one another's. Of prompts with the same beginning
    that arrive together, the first is computed and the others wait for its blocks.

    Blocks are taken as tokens are generated. When none is left for a next token, the last admitted request gives up
    its blocks, returns to the front of the queue and is recomputed later (preemption by recomputation, Kwon et
    al., 2023); it keeps its tokens and its adapter's slot. The first admitted request can have the blocks of
    all others, and each request alone fits into the cache, so some request always makes progress.

    With ``prompt_lookup``, a request that needs only its next token gets drafts, guesses of the tokens behind it, so
    that one step can produce several tokens (Leviathan et al., Fast Inference from Transformers via Speculative
    Decoding, 2023). They fill a step evenly up to ``drafted_tokens``, and take blocks that no other request needs soon.

    The scheduler is not locked: calls must not overlap. They may come at any moment between two others, for example
    add() and cancel() while a step is computed.

    Args:
        max_tokens_per_step (int): Not less than max_running, the requests in a step.
        max_waiting (int): Maximum number of requests that wait for the first time.
        seq_length (int): Maximum number of tokens of a prompt and its answer together.
        prompt_lookup (int): Maximum number of drafts of a request in a step.
        drafted_tokens (int): Maximum number of tokens of a step that has drafts.

    Attributes:
        running (list of Request): Requests with blocks, in the order of their admission.
        failed (list of Request): Finished because their adapter cannot be used; the code that notifies callers takes
            them out.
        preemptions (int): How often a request lost its blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        adapters: AdapterSlots,
        max_running: int,
        max_tokens_per_step: int,
        max_waiting: int,
        seq_length: int,
        prompt_lookup: int = 0,
        drafted_tokens: int = 64,
    ):
        self.pool = pool
        self.adapters = adapters
        self.max_running = max_running
        self.max_tokens_per_step = max_tokens_per_step
        self.max_waiting = max_waiting
        self.seq_length = seq_length
        self.prompt_lookup = prompt_lookup
        self.drafted_tokens = min(drafted_tokens, max_tokens_per_step)
        self.running: List[Request] = []
        self.failed: List[Request] = []
        self.preemptions = 0
        self._preempted: Deque[Request] = collections.deque()
        self._queue = FairQueue(patience=max_running)

    @property
    def waiting(self) -> List[Request]:
        """Requests that do not run; those that ran before come first."""
        return [*self._preempted, *self._queue]

    @property
    def waiting_count(self) -> int:
        """The number of waiting requests."""
        return len(self._preempted) + len(self._queue)

    def add(self, request: Request) -> None:
        """Puts a request in the queue, and starts loading its adapter.

        Raises:
            RequestError: It could not finish even if it were the only one.
            QueueFullError: max_waiting requests are already waiting.
            LoraError: The errors of adapters.prefetch.
        """
        self._check(request)
        if len(self._queue) >= self.max_waiting:
            raise QueueFullError(
                f"{len(self._queue)} requests wait already, and max_waiting is {self.max_waiting}: send it again "
                "later, or serve with more (--max-waiting)."
            )
        if request.adapter is not None:
            self.adapters.prefetch(request.adapter)
        if self.prompt_lookup:
            request.lookup = PromptLookup(self.prompt_lookup)
        self._queue.push(request)

    def plan(self) -> List[Part]:
        """Decides what the next step computes, admits requests and preempts others.

        Returns at most one part for each running request, those with one next token first; at most max_tokens_per_step
        tokens in total. Empty if nothing can be computed now, without requests or ready adapters.
        """
        parts = self._next_tokens()
        chunks = self._chunks(self.max_tokens_per_step - len(parts))
        if self.prompt_lookup:
            computed = len(parts) + sum(part.count for part in chunks)
            parts = self._with_drafts(parts, self.drafted_tokens - computed)
        return parts + chunks

    def advance(self, parts: Sequence[Part]) -> None:
        """Records that a step from plan() was computed; parts of finished requests are left out.

        Its tokens are appended to the requests after this.
        """
        for part in parts:
            if part.request.state is not State.RUNNING:
                continue
            if part.samples:
                self._queue.charge(part.request.adapter, 1)
            self._note_computed(part.request, part.start + part.count)

    def accept(self, request: Request) -> None:
        """Records that the next draft, now the request's last token, was right."""
        self._queue.charge(request.adapter, 1)
        self._note_computed(request, request.computed + 1)

    def finish(self, request: Request, reason: str, error: Optional[Exception] = None) -> bool:
        """Ends a request, and frees its blocks and its adapter's slot.

        The reason is "stop", "length", "cancelled" or "error". If it has already finished, nothing changes and False is
        returned.
        """
        if request.state is State.FINISHED:
            return False
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request in self._preempted:
            self._preempted.remove(request)
        else:
            self._queue.remove(request)
        self._drop_blocks(request)
        self._give_lease_back(request)
        request.state = State.FINISHED
        request.finish_reason = reason
        request.error = error
        request.finished = time.monotonic()
        return True

    def cancel(self, request: Request) -> bool:
        """Ends a request in any state. Returns False if it has already finished."""
        return self.finish(request, "cancelled")

    def _check(self, request: Request) -> None:
        prompt = len(request.prompt)
        new = request.sampling.max_tokens
        reads = request.sampling.reading is not None
        if new < (request.sampling.prompt_logprobs is None and not reads):
            raise RequestError(f"max_tokens is {new}: ask for at least one token.")
        if not request.tokens:
            least = "one" if new or reads else "two, the second of which has a log-probability"
            raise RequestError(f"The prompt has {prompt} tokens: give it at least {least}.")
        if len(request.tokens) + new > self.seq_length:
            raise RequestError(
                f"The prompt's {prompt} tokens and max_tokens, {new}, are {prompt + new} together, but a sequence has "
                f"at most {self.seq_length}: shorten the prompt or lower max_tokens."
            )
        blocks = self._blocks_for(len(request.tokens) + max(new, 1) - 1)  # the last new token is never computed
        if blocks > self.pool.num_blocks:
            raise RequestError(
                f"The request needs {blocks} blocks of the cache for {prompt} prompt tokens and {new} new ones, but "
                f"there are {self.pool.num_blocks}: shorten the prompt, lower max_tokens or serve with "
                "more (--num-blocks)."
            )

    def _note_computed(self, request: Request, end: int) -> None:
        """Records that the keys and values of a request's first ``end`` tokens are in the cache."""
        size = self.pool.block_size
        full = request.computed // size
        request.computed = end
        for i in range(full, end // size):
            before = request.blocks[i - 1] if i else None
            tokens = request.tokens[i * size : (i + 1) * size]
            salt = _salt(request, (i + 1) * size)
            request.blocks[i] = self.pool.fill(request.blocks[i], before, salt, tokens)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _next_tokens(self) -> List[Part]:
        """Returns the parts of requests that need only their next token, and makes room for them."""
        parts = []
        size = self.pool.block_size
        for request in self.running[:]:
            if request.state is not State.RUNNING:
                break  # preempted, like all that were admitted later
            start = request.computed
            if len(request.tokens) - start == 1 and (start < len(request.blocks) * size or self._make_room(request)):
                parts.append(Part(request, start, 1))
        return parts

    def _with_drafts(self, parts: Sequence[Part], room: int) -> List[Part]:
        """Returns the parts of next tokens with at most ``room`` drafts."""
        drafted = []
        for place, part in enumerate(parts):
            drafts = self._drafts(part, room // (len(parts) - place))
            room -= len(drafts)
            drafted.append(dataclasses.replace(part, drafts=drafts))
        return drafted

    def _drafts(self, part: Part, room: int) -> Tuple[int, ...]:
        request = part.request
        # The step produces one token more than right drafts, and the last token of an answer is never computed.
        left = request.sampling.max_tokens - len(request.generated) - 1
        room = min(room, left)
        if room <= 0:
            return ()
        drafts = request.lookup.guess(request.tokens, room)
        missing = self._blocks_for(part.start + 1 + len(drafts)) - len(request.blocks)
        if missing > 0:
            request.blocks += self.pool.allocate(min(missing, max(0, self._spare_blocks())))
        return tuple(drafts[: len(request.blocks) * self.pool.block_size - part.start - 1])

    def _make_room(self, request: Request) -> bool:
        """Gives a request one more block; returns False if it had to be preempted itself."""
        while not self.pool.blocks_available:
            newest = self.running[-1]
            self._preempt(newest)
            if newest is request:
                return False
        request.blocks += self.pool.allocate()
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._drop_blocks(request)
        request.state = State.WAITING
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self._preempted.appendleft(request)

    def _drop_blocks(self, request: Request) -> None:
        self.pool.free(request.blocks)
        request.blocks = []

    def _chunks(self, budget: int) -> List[Part]:
        """Returns parts for prompts, including those of requests that are admitted now."""
        if not budget:
            return []
        left = budget
        shares = []
        under_way = [request for request in self.running if len(request.tokens) - request.computed > 1]
        for request in itertools.chain(under_way, self._admissions()):
            if self._waits_for_block(request):
                continue
            missing = len(request.tokens) - request.computed
            share = min(missing, max(left // 2, min(left, self.pool.block_size)))
            shares.append((request, missing, share))
            left -= share
            if not left:
                break
        parts = []
        for request, missing, share in shares:
            more = min(missing - share, left)
            left -= more
            parts += self._chunk(request, share + more)
        return parts

    def _waits_for_block(self, request: Request) -> bool:
        """Gives a request the blocks that others have computed since; True if an earlier one computes the next."""
        size = self.pool.block_size
        if request.computed < len(request.blocks) * size:
            return False  # in the middle of a block of its own
        computed = self._find(request)[len(request.blocks) :]
        self.pool.share(computed)
        request.blocks += computed
        request.computed = len(request.blocks) * size
        if not request.preemptions:
            request.cached += len(computed) * size
        end = request.computed + size
        if end > request.reusable:
            return False
        for other in itertools.takewhile(lambda other: other is not request, self.running):
            will_compute = other.computed < end <= len(other.tokens)
            same = _salt(other, end) == _salt(request, end) and other.tokens[:end] == request.tokens[:end]
            if will_compute and same:
                return True
        return False

    def _find(self, request: Request) -> List[int]:
        """Returns the blocks of the cache that hold the beginning of a request, which need not be computed."""
        salt = _salt(request, len(request.tokens))
        common = _salt(request, request.adapted_from)
        found = self.pool.find(salt, request.tokens, request.adapted_from, common)
        return found[: request.reusable // self.pool.block_size]

    def _chunk(self, request: Request, count: int) -> List[Part]:
        """Returns the part for as many tokens as blocks allow; None without any."""
        missing = self._blocks_for(request.computed + count) - len(request.blocks)
        if missing > 0:
            request.blocks += self.pool.allocate(min(missing, self.pool.blocks_available))
        count = min(count, len(request.blocks) * self.pool.block_size - request.computed)
        return [Part(request, request.computed, count)] if count else []

    def _admissions(self) -> Iterator[Request]:
        """Yields requests, each of which runs from then on."""
        while self._preempted:
            if not self._start(self._preempted[0]):
                return
            yield self._preempted.popleft()
        for line in self._queue.turns() if self._has_room() else ():
            request = line.first
            try:
                if request.adapter is not None:
                    request.lease = self.adapters.acquire(request.adapter)
                    if request.lease is None:
                        self._queue.refuse(line, self.adapters.lacks_slot(request.adapter))
                        continue
                    request.adapted_from = request.lease.acts_from(request.prompt)
            except LoraError as error:
                self.finish(request, "error", error)
                self.failed.append(request)
                continue
            if not self._start(request):
                self._give_lease_back(request)
                return
            request.cached = request.computed
            request.admitted = time.monotonic()
            self._queue.admit(line, len(request.tokens) - request.computed)
            yield request
            if not self._has_room():
                return

    def _has_room(self) -> bool:
        """Returns whether a request is waiting for its first admission and one more could run."""
        return len(self._queue) > 0 and len(self.running) < self.max_running and self._spare_blocks() > 0

    def _give_lease_back(self, request: Request) -> None:
        if request.lease is not None:
            self.adapters.release(request.lease)
            request.lease = None

    def _spare_blocks(self) -> int:
        """Returns the number of blocks beyond those that running requests need for their tokens and one more each.

        Without the extra block, a request could be admitted and then preempted for another's next token.
        """
        # A request that had drafts may have more than it needs.
        needed = [1 + self._blocks_for(len(request.tokens)) - len(request.blocks) for request in self.running]
        return self.pool.blocks_available - sum(max(0, blocks) for blocks in needed)

    def _start(self, request: Request) -> bool:
        """Starts a request with the blocks that already hold its beginning; returns False if too few are left."""
        beginning = self._find(request)
        taken = self._blocks_for(len(request.tokens)) - sum(self.pool.users(block) > 0 for block in beginning)
        if taken > self._spare_blocks():
            return False
        self.pool.share(beginning)
        request.blocks = beginning
        request.computed = len(beginning) * self.pool.block_size
        request.state = State.RUNNING
        self.running.append(request)
        return True


def _salt(request: Request, end: int) -> Hashable:
    """Returns a salt that identifies whose keys and values may be used for a request's block ending at ``end``.

    Before an adapter acts, its keys and values are the base's.
    """
    secret = request.sampling.cache_salt
    if request.lease is None or end <= request.adapted_from:
        return secret
    return secret, request.lease.name, request.lease.version, request.adapted_from
