"""Sampling: from the logits of a step to the next token of each request."""

import math
import secrets
from typing import FrozenSet, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from mindlora.core.errors import RequestError, ServingError
from mindlora.serving.request import Sampling

# Values whose maxima or sums are looked at first.
_BLOCK = 128
# Tokens that are mostly enough for top_p.
_LIKELY = 128
# Up to this many candidates are sorted.
_FEW = 512
# Halvings of the range in which a border is looked for: more than float32 can tell apart.
_HALVINGS = 40
# A temperature below this is 0, as in vLLM: float32 could not hold the quotients.
COLDEST = 1e-5
# A log-probability below this is reported as this, as in vLLM: JSON has no infinity.
LEAST = -9999.0


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices, int64 ascending, of the ``count`` largest values and of all equal to the smallest of these.

    ``values`` are float [n] without NaN, ``count`` is at least 1.
    """
    size = len(values)
    if count >= size:
        return np.arange(size)
    places = None
    if size // _BLOCK >= count:
        # ``count`` blocks have a maximum of at least this one: no smaller value is among the largest.
        maxima = values[: size // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
        places = np.flatnonzero(values >= np.partition(maxima, -count)[-count])
        values = values[places]
    among = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return among if places is None else places[among]


def nucleus(masses: np.ndarray, top_p: float) -> np.ndarray:
    """Returns the places of the fewest largest masses that make up top_p of their sum (Holtzman et al., 2020).

    The places are in ascending order. A mass is kept if those before it, from the largest on, make up less than top_p;
    so one is always kept. Among equal ones, the first are kept. The masses are float32 [n], not negative; the largest
    is 1.
    """
    needed = max(top_p * float(masses.sum(dtype=np.float64)), np.finfo(np.float64).tiny)
    places = largest(masses, _LIKELY)
    if float(masses[places].sum(dtype=np.float64)) >= needed:
        return places[_first(masses[places], needed)]
    return _first(masses, needed)


def _first(masses, needed):
    """Returns the places of the fewest largest masses whose sum is ``needed`` or more."""
    border, rank = _border(masses, needed)
    kept = masses >= border
    excess = int(np.count_nonzero(kept)) - rank
    if excess > 0:
        kept[np.flatnonzero(masses == border)[-excess:]] = False
    return np.flatnonzero(kept)


def _border(masses, needed) -> Tuple[np.float32, int]:
    """Returns the smallest mass that is kept, and how many are.

    The masses above ``low`` are enough, those above ``high`` are not: the range is halved (in the logarithm) until few
    masses lie in it, which are sorted. A pass over all is many times faster than a sort.
    """
    # Masses below this are less than what is not needed even if all are: the factor is for rounding.
    unneeded = float(masses.sum(dtype=np.float64)) - needed
    low = np.float32(0.999 * max(unneeded, 0.0) / len(masses))
    high = masses.max()
    before = 0.0
    many = len(masses)
    few = 0
    above = np.empty(len(masses), bool)
    product = np.empty_like(masses)
    for _ in range(_HALVINGS):
        if many - few <= _FEW:
            break
        middle = np.float32(math.sqrt(float(low) * float(high)))
        np.greater(masses, middle, out=above)
        mass = float(np.multiply(masses, above, out=product).sum(dtype=np.float64))
        count = int(np.count_nonzero(above))
        if mass >= needed:
            low = middle
            many = count
        else:
            high = middle
            few = count
            before = mass
    between = np.sort(masses[(masses > low) & (masses <= high)])[::-1]
    last = int(np.searchsorted(before + np.cumsum(between, dtype=np.float64), needed))
    last = min(last, len(between) - 1)
    return between[last], few + last + 1


def draw(masses: np.ndarray, uniform: float) -> int:
    """Returns a place, drawn with probabilities proportional to the masses: the inverse of their running sum.

    The masses are float32 [n], not negative and not all 0; ``uniform`` is a random number from [0, 1).
    """
    blocks = np.cumsum(np.add.reduceat(masses, np.arange(0, len(masses), _BLOCK), dtype=np.float64))
    # Above 0 and not above the sum, so that a mass of 0 is never drawn.
    target = (1.0 - uniform) * blocks[-1]
    block = int(np.searchsorted(blocks, target))
    before = blocks[block - 1] if block else 0.0
    within = np.cumsum(masses[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + int(np.searchsorted(within, min(target - before, within[-1])))


class Penalties:
    """The penalties of one request, and before them its logit_bias.

    The repetition penalty r counts the prompt's tokens too: a logit above 0 becomes logit / r, another logit * r
    (Keskar et al., CTRL, 2019, as transformers and vLLM have it). From the logit of a token that was generated n >= 1
    times, presence + n * frequency is subtracted then (OpenAI).
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]):
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._prompt = np.unique(np.asarray(prompt, np.int64))
        self._biased = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in sampling.logit_bias], np.float32)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(len(self._biased)) or self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0

    def apply(self, logits: np.ndarray, generated: Sequence[int]) -> np.ndarray:
        """Returns the logits, float32 [vocabulary], after the penalties, as a new array."""
        logits = logits.copy()
        logits[self._biased] += self._bias
        tokens, counts = np.unique(np.asarray(generated, np.int64), return_counts=True)
        if self._repetition != 1.0:
            seen = np.union1d(self._prompt, tokens)
            values = logits[seen]
            logits[seen] = np.where(values < 0, values * self._repetition, values / self._repetition)
        logits[tokens] -= self._presence + self._frequency * counts
        return logits


class Bans:
    """The tokens that may not come next in one answer.

    They are those that are not among allowed_tokens, its ends before min_tokens, and the last of each bad word.
    """

    def __init__(self, sampling: Sampling, ends: FrozenSet[int]):
        self._allowed = [*sampling.allowed_tokens, *ends] if sampling.allowed_tokens else []
        self._words = [list(word) for word in sampling.bad_words]
        self._least = sampling.min_tokens
        self._ends = list(ends)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._allowed) or bool(self._words) or self._least > 0

    def apply(self, logits: np.ndarray, generated: Sequence[int]) -> np.ndarray:
        """Returns logits, float32 [vocabulary], as a new array with minus infinity for them.

        Where a grammar allows nothing else, the logits stay what they are.
        """
        banned = self._ends if len(generated) < self._least else []
        follows = [word[-1] for word in self._words if list(generated[len(generated) - len(word) + 1 :]) == word[:-1]]
        left = logits.copy()
        if self._allowed:
            others = np.ones(len(logits), bool)
            others[[token for token in self._allowed if token < len(logits)]] = False
            left[others] = -np.inf
        left[[token for token in (*banned, *follows) if token < len(logits)]] = -np.inf
        return left if np.isfinite(left).any() else logits


class Sampled(NamedTuple):
    """A token that was chosen.

    Attributes:
        token (int): Its id.
        logprob (float or None): Its log-probability: log softmax of the logits as they come from the network, before
            grammar, logit_bias, penalties, temperature, top_k and top_p, as OpenAI and vLLM report it; at least LEAST.
            None if the request wants none.
        top (list of (int, float)): The likeliest tokens and their log-probabilities, the likeliest first; as many as
            the request asks for, whether the chosen token is among them or not.
    """

    token: int
    logprob: Optional[float] = None
    top: Sequence[Tuple[int, float]] = ()


class Sampler:
    """Chooses the tokens of one request.

    The order is that of transformers and vLLM: grammar, allowed_tokens, bad_words and min_tokens, logit_bias,
    penalties, temperature, min_p, top_k, top_p. Each drawn token takes one number from the request's own random stream,
    so that a seed gives the same text in any batch; ``seed`` is drawn here if the request has none. ``ends`` are the
    tokens that end the answer, which a grammar needs. Errors name the adapter.

    Raises RequestError if a number of ``sampling`` is out of range.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_tokens: Sequence[int],
        adapter: Optional[str] = None,
        ends: FrozenSet[int] = frozenset(),
    ):
        check_sampling(sampling)
        self.sampling = sampling
        self.adapter = adapter
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self.greedy = sampling.temperature < COLDEST or sampling.top_k == 1
        self._penalties = Penalties(sampling, prompt_tokens)
        self._bans = Bans(sampling, ends)
        self._ends = ends
        self._matcher = sampling.grammar.matcher(ends) if sampling.grammar else None
        self._random = np.random.default_rng(self.seed % 2**64)

    def sample(self, logits: np.ndarray, generated: Sequence[int]) -> Sampled:
        """Returns the next token from logits, float32 [vocabulary], and the tokens generated so far.

        Raises ServingError if the logits hold NaN, or infinity where it would be chosen, or the grammar is too complex.
        """
        return self._sample(logits, generated, int(logits.argmax()))

    def kept(self, logits: np.ndarray, generated: Sequence[int]) -> Tuple[np.ndarray, np.ndarray]:
        """Returns the tokens that can be drawn, int64 [n] ascending, and their probabilities, float64 [n]."""
        tokens, masses = self._masses(self._adjusted(logits, generated))
        tokens = np.arange(len(masses)) if tokens is None else tokens
        return tokens, masses / masses.sum(dtype=np.float64)

    def run(
        self, logits: np.ndarray, generated: Sequence[int], drafts: Sequence[int], likeliest: Sequence[int]
    ) -> List[Union[Sampled, ServingError]]:
        """Returns the next tokens, up to the first that differs from its draft, ends the answer or fails.

        They equal successive results of ``sample``: ``logits``, float32 [1 + drafts, vocabulary], are
        the logits after the last token and after each draft. ``likeliest`` is the place of the largest in each row, or
        of a NaN.
        """
        sampled: List[Union[Sampled, ServingError]] = []
        generated = list(generated)
        for row, place, draft in zip(logits, likeliest, [*drafts, None]):
            try:
                sampled.append(self._sample(row, generated, place))
            except ServingError as error:
                return [*sampled, error]
            token = sampled[-1].token
            generated.append(token)
            if token != draft or token in self._ends:
                break
        return sampled

    def _sample(self, logits, generated, likeliest: int) -> Sampled:
        """Like sample; ``likeliest`` is the place of the largest logit, or of a NaN."""
        if not math.isfinite(logits[likeliest]):
            raise _not_finite(self.adapter, f"at token {len(generated) + 1} of the answer")
        adjusted = self._adjusted(logits, generated)
        if self.greedy:
            token = likeliest if adjusted is logits else int(adjusted.argmax())
        else:
            tokens, masses = self._masses(adjusted)
            place = draw(masses, self._random.random())
            token = place if tokens is None else int(tokens[place])
        if self.sampling.tempered_logprobs and not self.greedy:
            logits = logits / np.float32(self.sampling.temperature)
        return _reported(token, logits, likeliest, self.sampling.logprobs)

    def _adjusted(self, logits, generated):
        if self._matcher is not None:
            logits = self._matcher.mask(logits, generated)
        if self._bans:
            logits = self._bans.apply(logits, generated)
        return self._penalties.apply(logits, generated) if self._penalties else logits

    def _masses(self, logits):
        """Returns the tokens that can be drawn (None for all) and masses proportional to their probabilities."""
        tokens = largest(logits, self.sampling.top_k) if self.sampling.top_k > 0 else None
        masses = logits if tokens is None else logits[tokens]
        with np.errstate(over="ignore", under="ignore"):
            masses = np.exp((masses - masses.max()) / np.float32(self.sampling.temperature))
        if self.sampling.min_p > 0.0:
            places = np.flatnonzero(masses >= np.float32(self.sampling.min_p))
            tokens, masses = places if tokens is None else tokens[places], masses[places]
        if self.sampling.top_p < 1.0:
            places = nucleus(masses, self.sampling.top_p)
            tokens, masses = places if tokens is None else tokens[places], masses[places]
        return tokens, masses


def score_token(token: int, logits: np.ndarray, count: Optional[int], adapter: Optional[str]) -> Sampled:
    """Returns a given token with its log-probability under logits, float32 [vocabulary], as Sampler reports it.

    ``count`` is the number of likeliest tokens to report with it. Raises ServingError, which names ``adapter``, if
    the logits are not finite.
    """
    likeliest = int(logits.argmax())
    if not math.isfinite(logits[likeliest]):
        raise _not_finite(adapter, "within the prompt")
    return _reported(token, logits, likeliest, count)


def _reported(token: int, logits: np.ndarray, likeliest: int, count: Optional[int]) -> Sampled:
    if count is None:
        return Sampled(token)
    with np.errstate(over="ignore", under="ignore"):
        shifted = logits - logits[likeliest]
        logarithm = math.log(np.exp(shifted).sum(dtype=np.float64))
    top = largest(shifted, count) if count else np.arange(0)
    top = top[np.argsort(-shifted[top], kind="stable")][:count].tolist()
    values = [max(float(shifted[place]) - logarithm, LEAST) for place in [token, *top]]
    return Sampled(token, values[0], list(zip(top, values[1:])))


def _not_finite(adapter: Optional[str], where: str) -> ServingError:
    model = "the base model" if adapter is None else f"adapter {adapter!r}"
    return ServingError(
        f"The logits of {model} are not finite {where}: set compute_dtype to bfloat16 or float32, or look "
        "for NaN and infinity in the weights."
    )


def sample_batch(
    samplers: Sequence[Sampler], logits: np.ndarray, generated: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]
) -> List[List[Union[Sampled, ServingError]]]:
    """Returns the next tokens of each request, as ``Sampler.run`` does, or the error of a request that fails.

    ``logits`` has the rows of all requests, one after the other; a request without drafts has one.
    """
    # A NaN counts as the largest: one call gives the greedy tokens, the maximum for exp and whether a row is usable.
    likeliest = logits.argmax(axis=1).tolist()
    runs = []
    end = 0
    for sampler, tokens, drafted in zip(samplers, generated, drafts):
        begin, end = end, end + 1 + len(drafted)
        runs.append(sampler.run(logits[begin:end], tokens, drafted, likeliest[begin:end]))
    return runs


def check_sampling(sampling: Sampling) -> None:
    """Raises RequestError if a number is out of its valid range. (NaN is never in range.)"""
    ranges = (
        ("temperature", 0.0 <= sampling.temperature < math.inf, "a number of at least 0"),
        ("top_p", 0.0 <= sampling.top_p <= 1.0, "from 0 to 1"),
        ("top_k", sampling.top_k >= -1, "a whole number of at least 1, or 0 or -1 for all tokens"),
        ("min_p", 0.0 <= sampling.min_p <= 1.0, "from 0 to 1"),
        ("min_tokens", sampling.min_tokens >= 0, "a whole number of at least 0"),
        ("bad_words", all(sampling.bad_words), "texts that have tokens"),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty < math.inf, "above 0; 1 is none"),
        ("presence_penalty", abs(sampling.presence_penalty) < math.inf, "a finite number"),
        ("frequency_penalty", abs(sampling.frequency_penalty) < math.inf, "a finite number"),
        ("logprobs", sampling.logprobs is None or sampling.logprobs >= 0, "a whole number of at least 0"),
        (
            "prompt_logprobs",
            sampling.prompt_logprobs is None or sampling.prompt_logprobs >= 0,
            "a whole number of at least 0",
        ),
        ("scored_from", sampling.scored_from >= 1, "at least 1"),
    )
    for name, is_valid, meaning in ranges:
        if not is_valid:
            raise RequestError(f"{name} is {getattr(sampling, name)}: it must be {meaning}.")
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, but the answer has {sampling.max_tokens} tokens at most: lower "
            "min_tokens, or raise max_tokens."
        )
    if sampling.grammar is not None and sampling.ignore_eos:
        raise RequestError("ignore_eos is set, but the end of a constrained answer is its end token: leave one out.")
