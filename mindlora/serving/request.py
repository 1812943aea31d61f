"""Request: what one caller asks for, and how far it has come."""

import dataclasses
import enum
import itertools
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mindlora.core.errors import RequestError
from mindlora.core.text import shown
from mindlora.run.checks.invocation import last_start
from mindlora.serving.prompt_lookup import PromptLookup

_IDS = itertools.count()


class Reading(NamedTuple):
    """What is asked of a text in place of an answer.

    Attributes:
        scores (bool): Whether that are the scores of the adapter's head, and not what a head takes, the hidden state
            behind the last norm.
        every (bool): Of every token, and not of the last one alone.
    """

    scores: bool
    every: bool


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a request ends.

    Attributes:
        max_tokens (int): New tokens at most; 0 with prompt_logprobs, to have a text scored and nothing added, and with
            reading.
        temperature (float): Divides the logits; 0 always takes the likeliest token.
        top_p (float): Only the likeliest tokens whose probabilities add up to top_p are drawn from.
        top_k (int): Only the top_k likeliest tokens are drawn from; 0 for all.
        min_p (float): Only tokens are drawn from that are at least min_p times as likely as the likeliest (vLLM).
        repetition_penalty (float): Above 1, the logits of tokens that occurred already are made smaller (Keskar et al.,
            CTRL, 2019).
        presence_penalty (float): Subtracted from the logits of tokens that were generated already (OpenAI).
        frequency_penalty (float): The same, times how often each was generated (OpenAI).
        logit_bias (tuple of (int, float)): Tokens, and what is added to the logit of each (OpenAI).
        allowed_tokens (tuple of int): The tokens of which the answer may consist, and its ends; none for all (vLLM).
        bad_words (tuple of tuple of int): Tokens of texts that the answer does not have: the last of them is not drawn
            behind the others (vLLM).
        min_tokens (int): As long as the answer has fewer, no token and no text of ``stop`` ends it (vLLM).
        seed (int or None): Seed of the request's own random stream; None draws one.
        stop (tuple of str): Texts that end the answer; they are not part of it, unless stop_is_shown.
        stop_tokens (tuple of int): Tokens that end the answer as the end token does, whatever ignore_eos says.
        ignore_eos (bool): Go on after the end token, up to max_tokens.
        logprobs (int or None): How many of the likeliest tokens to report beside the chosen one; None for no report.
        tempered_logprobs (bool): Whether log-probabilities of tokens that are drawn are those of the logits divided by
            the temperature, as a policy that is trained at this temperature has them.
        prompt_logprobs (int or None): The same for the tokens of the prompt, from scored_from on; None for no report.
        scored_from (int): Index of the first token of the prompt to report; at least 1, since nothing predicts the
            first.
        grammar (Grammar or None): What the answer must be: see mindlora.serving.constraints.
        reading (Reading or None): What is asked in place of an answer.
        cache_salt (str or None): Keys and values of the prompt are shared only with requests of the same salt (vLLM).
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
    """Where a request is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True)
class Lease:
    """A slot of the pools that holds an adapter and keeps it while requests use it.

    ``version`` is new each time files are read, so that keys and values of an adapter that was replaced on disk are
    never used with its successor. ``invocation_tokens`` are those from which on the adapter acts; none if on all.
    """

    name: str
    slot: int
    version: int
    invocation_tokens: Tuple[int, ...] = ()

    def acts_from(self, prompt: Sequence[int]) -> int:
        """Returns the index of the first token of a prompt that the adapter acts on.

        That is the first of the invocation tokens where they come last (Greenewald et al., Activated LoRA, 2025; PEFT
        has it so). Raises RequestError if they do not come at all.
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


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt with its adapter, and the tokens that continue it.

    Attributes:
        prompt (list of int): Token ids, at least one.
        adapter (str or None): Name of the adapter; None for the base.
        number (int): Unique in the process, in the order of creation.
        tokens (list of int): The prompt and what was generated. Where a prompt is scored alone, the prompt without its
            last token, after which nothing is asked.
        computed (int): The tokens from the start whose keys and values are in the cache.
        cached (int): Those of the prompt's tokens that were in the cache before the request came.
        blocks (list of int): The blocks of the cache that hold them, in order.
        lookup (PromptLookup or None): What guesses its next tokens, if the engine speculates.
        prompt_logprobs (dict): Index in the prompt -> Sampled, of the tokens that were asked for and are computed.
        vectors (dict): Index in the prompt -> float32 [width], of the tokens that a reading asks for and are computed.
        lease (Lease or None): The adapter's slot, while the request runs; None for the base.
        adapted_from (int): The index of the first token that the adapter acts on.
        finish_reason (str or None): "stop", "length", "cancelled" or "error" when it is finished.
        preemptions (int): How often it lost its blocks and was computed again.
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
        """How many of its first tokens need no step if their keys and values are in the cache already."""
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
    """What one step computes for one request: tokens[start : start + count]; those before it are in the cache.

    ``drafts`` are guesses of the tokens that come next, which the step computes too if it samples.
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
        """The tokens of the prompt, by index, whose log-probabilities the step gives: those after computed ones."""
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
