"""Request: one caller's request and its progress, with guesses of its next tokens."""

import dataclasses
import enum
import itertools
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.core.errors import RequestError
from mindlora.core.text import shown
from mindlora.run.checks.invocation import last_start

_IDS = itertools.count()
# How many last tokens are searched for in the text before them, the longest run first.
_RUNS = (3, 2)


class Reading(NamedTuple):
    """A reading of a text, requested in place of an answer.

    Attributes:
        scores (bool): Whether it is the scores of the adapter's head, rather than a head's input, the hidden state
            behind the last norm.
        every (bool): Whether for every token, rather than for the last one alone.
    """

    scores: bool
    every: bool


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and when a request ends.

    Attributes:
        max_tokens (int): Maximum number of new tokens; 0 with prompt_logprobs, to score a text without an answer, and
            with reading.
        temperature (float): Divides the logits; 0 always selects the likeliest token.
        top_p (float): Draws only from the likeliest tokens whose probabilities add up to top_p.
        top_k (int): Draws only from the top_k likeliest tokens; 0 for all.
        min_p (float): Draws only from tokens at least min_p times as likely as the likeliest (vLLM).
        repetition_penalty (float): Above 1, it reduces the logits of tokens that have occurred (Keskar et al.,
            CTRL, 2019).
        presence_penalty (float): Subtracted from the logits of tokens that have been generated (OpenAI).
        frequency_penalty (float): The same, times how often each was generated (OpenAI).
        logit_bias (tuple of (int, float)): Tokens, and the number added to the logit of each (OpenAI).
        allowed_tokens (tuple of int): The tokens that the answer may contain, besides its ends; empty for all (vLLM).
        bad_words (tuple of tuple of int): Tokens of texts that the answer must not contain: the last of them is not
            drawn behind the others (vLLM).
        min_tokens (int): While the answer has fewer tokens, no token and no text of ``stop`` ends it (vLLM).
        seed (int or None): Seed of the request's own random stream; None draws one.
        stop (tuple of str): Texts that end the answer; they are not part of it, unless stop_is_shown.
        stop_tokens (tuple of int): Tokens that end the answer like the end token, even with ignore_eos.
        ignore_eos (bool): Whether to continue after the end token, up to max_tokens.
        logprobs (int or None): Number of likeliest tokens to report beside the chosen one; None for no report.
        tempered_logprobs (bool): Whether log-probabilities of drawn tokens come from the logits divided by
            the temperature, as for a policy that is trained at this temperature.
        prompt_logprobs (int or None): The same for the tokens of the prompt, from scored_from on; None for no report.
        scored_from (int): Index of the first token of the prompt to report; at least 1, since nothing predicts the
            first.
        grammar (Grammar or None): The constraint on the answer: see mindlora.serving.constraints.
        reading (Reading or None): The reading that is requested in place of an answer.
        cache_salt (str or None): Keys and values of the prompt are shared only between requests with the same salt
            (vLLM).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Tuple[Tuple[int, float], ...] = ()
    allowed_tokens: Tuple[int, ...] = ()
    bad_words: Tuple[Tuple[int, ...], ...] = ()
    min_tokens: int = 0
    seed: Optional[int] = None
    stop: Tuple[str, ...] = ()
    stop_is_shown: bool = False
    stop_tokens: Tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Optional[int] = None
    tempered_logprobs: bool = False
    prompt_logprobs: Optional[int] = None
    scored_from: int = 1
    grammar: Optional[Any] = None
    reading: Optional[Reading] = None
    cache_salt: Optional[str] = None


class State(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True)
class Lease:
    """A slot of the pools that holds an adapter and keeps it while requests use it.

    ``version`` is new each time files are read, so that keys and values of an adapter that was replaced on disk are
    never used with its successor. ``invocation_tokens`` are the tokens from which on the adapter acts; empty for all.
    """

    name: str
    slot: int
    version: int
    invocation_tokens: Tuple[int, ...] = ()

    def acts_from(self, prompt: Sequence[int]) -> int:
        """Returns the index of the first token of a prompt on which the adapter acts.

        It is the first token of the last occurrence of the invocation tokens (Greenewald et al., Activated LoRA, 2025;
        as in PEFT). Raises RequestError if they do not occur.
        """
        invocation = list(self.invocation_tokens)
        if not invocation:
            return 0
        start = last_start(list(prompt), invocation)
        if start is not None:
            return start
        raise RequestError(
            f"The prompt lacks the tokens {shown(invocation)}, from which on {shown(self.name)} acts "
            "(alora_invocation_tokens): add their text, or ask the base."
        )


class PromptLookup:
    """Guesses the next tokens of one text, its prompt and the answer so far (Saxena, Prompt Lookup Decoding, 2023).

    The guess is what followed the last tokens at their latest earlier occurrence. If it reaches the end of
    the text, it continues through itself, as a text that repeats itself does (Ziv and Lempel, 1977).

    A guess has up to ``most`` tokens, and at most one more than twice the right ones of the previous guess: in
    a text without repetitions, one token is guessed in vain.
    """

    def __init__(self, most: int):
        self._most = most
        self._limit = most
        # Run of tokens -> index of the token after its last occurrence.
        self._next: Dict[Tuple[int, ...], int] = {}
        self._indexed = 0

    def guess(self, tokens: Sequence[int], room: int) -> List[int]:
        """Returns a guess of a text's continuation, at most ``room`` tokens; each text begins with the previous one."""
        for end in range(self._indexed, len(tokens)):
            for run in _RUNS:
                if run <= end:
                    self._next[tuple(tokens[end - run : end])] = end
        self._indexed = len(tokens)
        count = min(self._limit, room)
        for run in _RUNS:
            begin = self._next.get(tuple(tokens[-run:]))
            if begin is not None and run <= len(tokens):
                return _continued(tokens, begin, count)
        return []

    def note(self, right: int) -> None:
        """Records how many tokens of the last guess were right."""
        self._limit = min(self._most, 2 * right + 1)


def _continued(tokens: Sequence[int], begin: int, count: int) -> List[int]:
    """Returns the ``count`` tokens from ``begin`` on of the text continued by its own repetition."""
    guessed = list(tokens[begin : begin + count])
    while len(guessed) < count:
        guessed.append(guessed[len(guessed) - (len(tokens) - begin)])
    return guessed


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt with its adapter, and the tokens that continue it.

    Attributes:
        prompt (list of int): Token ids, at least one.
        adapter (str or None): Name of the adapter; None for the base.
        number (int): Unique in the process, in the order of creation.
        tokens (list of int): The prompt and the generated tokens. For a prompt that is only scored, the prompt without
            its last token, whose successor is not requested.
        computed (int): The tokens from the start whose keys and values are in the cache.
        cached (int): The prompt's tokens that were in the cache before the request arrived.
        blocks (list of int): The blocks of the cache that hold its keys and values, in order.
        lookup (PromptLookup or None): The source of guesses of its next tokens, if the engine speculates.
        prompt_logprobs (dict): Index in the prompt -> Sampled, for requested tokens that are computed.
        vectors (dict): Index in the prompt -> float32 [width], for tokens of a reading that are computed.
        lease (Lease or None): The adapter's slot, while the request runs; None for the base.
        adapted_from (int): The index of the first token on which the adapter acts.
        finish_reason (str or None): "stop", "length", "cancelled" or "error" when it is finished.
        preemptions (int): How often it lost its blocks and was recomputed.
        arrived, admitted, first_token, finished (float): Times, in seconds of time.monotonic(); 0.0 until they come.
    """

    prompt: List[int]
    sampling: Sampling
    adapter: Optional[str] = None
    number: int = dataclasses.field(default_factory=lambda: next(_IDS))
    tokens: List[int] = dataclasses.field(init=False)
    computed: int = 0
    cached: int = 0
    blocks: List[int] = dataclasses.field(default_factory=list)
    lookup: Optional[PromptLookup] = None
    prompt_logprobs: Dict[int, Any] = dataclasses.field(default_factory=dict)
    vectors: Dict[int, Any] = dataclasses.field(default_factory=dict)
    lease: Optional[Lease] = None
    adapted_from: int = 0
    state: State = State.WAITING
    finish_reason: Optional[str] = None
    error: Optional[Exception] = None
    preemptions: int = 0
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def __post_init__(self):
        is_scored_alone = self.sampling.max_tokens == 0 and self.sampling.reading is None
        self.tokens = self.prompt[:-1] if is_scored_alone else list(self.prompt)

    @property
    def generated(self) -> List[int]:
        """The new tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def reusable(self) -> int:
        """The number of its first tokens that need no step if their keys and values are already in the cache."""
        if self.sampling.reading is not None and self.sampling.reading.every:
            return 0
        if self.sampling.prompt_logprobs is None:
            return len(self.tokens) - 1
        return min(self.sampling.scored_from, len(self.tokens)) - 1

    @property
    def slot(self) -> int:
        """The slot of its adapter, -1 for the base."""
        return self.lease.slot if self.lease else -1


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a request that one step computes: tokens[start : start + count]; tokens before it are in the cache.

    ``drafts`` are guesses of the next tokens, which the step also computes if it samples.
    """

    request: Request
    start: int
    count: int
    drafts: Tuple[int, ...] = ()

    @property
    def tokens(self) -> List[int]:
        """The tokens that the step computes."""
        return [*self.request.tokens[self.start : self.start + self.count], *self.drafts]

    @property
    def samples(self) -> bool:
        """Whether the step computes the last token, after which the next one is chosen."""
        return self.start + self.count == len(self.request.tokens)

    @property
    def scores(self) -> range:
        """The tokens of the prompt, by index, whose log-probabilities the step gives: successors of computed ones."""
        sampling, end = self.request.sampling, min(self.start + self.count + 1, len(self.request.prompt))
        if sampling.prompt_logprobs is None:
            return range(0)
        return range(max(self.start + 1, sampling.scored_from), end)

    @property
    def reads(self) -> range:
        """The tokens of the prompt, by index, whose vectors the step gives."""
        reading, end = self.request.sampling.reading, self.start + self.count
        if reading is None or not (reading.every or self.samples):
            return range(0)
        return range(self.start if reading.every else end - 1, end)
