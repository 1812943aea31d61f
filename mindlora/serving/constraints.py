"""Constraints: answers that are JSON of a schema, match a regex, are one of several texts, or follow a grammar.

llguidance (https://github.com/guidance-ai/llguidance) compiles them and tells which tokens may come next.
"""

import dataclasses
import json
import threading
from concurrent import futures
from typing import Any, FrozenSet, List, Sequence

import numpy as np

from mindlora.errors import RequestError

try:
    import llguidance
    import llguidance.hf
except ImportError:  # the server's extra has it; everything else goes without
    llguidance = None

# Characters of a constraint, at most, and of one in GBNF, whose conversion takes time with the square of its length.
LONGEST = 1 << 17
LONGEST_GBNF = 1 << 13
# Bytes of the stack on which a constraint is compiled. llguidance follows references by recursion: a chain of thousands
# of them, which fits into LONGEST, would end the process on the 8 MiB that a thread has.
_STACK = 1 << 29
# Between the parts of JSON: nothing, a space, or a new line with its indentation. A model that may write white space
# without end sometimes does.
_WHITE_SPACE = r"(\x20|\n\x20{0,40})"
# How a schema is read, over what it may say of that itself ("x-guidance").
JSON_RULES = {"whitespace_pattern": _WHITE_SPACE, "lenient": False, "coerce_one_of": False}
_FORBIDDEN = np.float32(-np.inf)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an answer must be.

    Attributes:
        kind (str): "json" (``value`` is a JSON schema, as an object or its text), "regex" (all of the answer matches
            it, in the syntax of Rust's regex), "choice" (one of a list of texts), "grammar" (in Lark or GBNF) or
            "lark".
        field (str): The field of the request that asks for it, for errors.
    """

    kind: str
    value: Any
    field: str


class Matcher:
    """Tells which tokens may continue one answer; ``ends`` are the tokens that end it."""

    def __init__(self, matcher: Any, end: int, vocab_size: int, ends: FrozenSet[int], field: str):
        self._matcher = matcher
        self._end = end
        self._vocab_size = vocab_size
        self._ends = sorted(ends)
        self._field = field
        self._followed: List[int] = []

    def mask(self, logits: np.ndarray, generated: Sequence[int]) -> np.ndarray:
        """Returns logits, float32 [vocabulary], as a new array with minus infinity for tokens that may not come next.

        ``generated`` are the tokens of the answer so far; the matcher follows them, also where they were taken back.

        Raises RequestError if it would take too long to find out.
        """
        self._follow(list(generated))
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        allowed = np.zeros(len(logits), bool)
        known = min(self._vocab_size, len(logits))
        allowed[:known] = bits[:known]
        if allowed[self._end]:
            allowed[[token for token in self._ends if token < len(logits)]] = True
        return np.where(allowed, logits, _FORBIDDEN)

    def _follow(self, generated):
        if generated[: len(self._followed)] != self._followed:
            self._matcher.reset()
            self._followed = []
        self._matcher.consume_tokens(generated[len(self._followed) :])
        self._followed = generated
        self._check()

    def _check(self):
        if self._matcher.is_error():
            raise RequestError(
                f"{self._field} is too complex to go on with the answer ({_reason(self._matcher)}): ask for something "
                "simpler."
            )


class Grammar:
    """A compiled constraint. Each answer gets a matcher of its own."""

    def __init__(self, matcher: Any, end: int, vocab_size: int, field: str):
        self._matcher = matcher
        self._end = end
        self._vocab_size = vocab_size
        self._field = field

    def matcher(self, ends: FrozenSet[int]) -> Matcher:
        """Returns a matcher for an answer that one of the tokens ``ends`` ends."""
        return Matcher(self._matcher.deep_copy(), self._end, self._vocab_size, ends, self._field)


class ConstraintCompiler:
    """Compiles constraints for the tokens of one tokenizer, which it goes through at the first one: a second, once."""

    # One change of the stack's size at a time: it is the whole process's.
    _starting = threading.Lock()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, constraint: Constraint, seconds: float = 10.0) -> Grammar:
        """Returns what makes matchers of a constraint, within ``seconds``.

        Raises RequestError, which names the field, if the constraint is not valid, asks for what llguidance cannot
        enforce, is too large, takes too long or can never be met; or if llguidance is not there or cannot use the
        tokenizer.
        """
        compiled: "futures.Future[Grammar]" = futures.Future()
        thread = threading.Thread(target=self._settle, args=(compiled, constraint), daemon=True)
        with self._starting:
            before = threading.stack_size(_STACK)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        try:
            return compiled.result(seconds)
        except futures.TimeoutError as error:
            raise _unusable(constraint, f"it takes more than {seconds:g} seconds to compile") from error

    def _settle(self, compiled, constraint):
        try:
            compiled.set_result(self._compile(constraint))
        except Exception as error:  # for whoever waits
            compiled.set_exception(error)

    def _compile(self, constraint):
        vocabulary = self._prepare(constraint.field)
        try:
            grammar = _grammar(constraint)
        except (ValueError, RecursionError) as error:
            raise _unusable(constraint, _one_line(str(error))) from error
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        if matcher.is_error():
            raise _unusable(constraint, _reason(matcher))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_stopped() and not first.is_accepting():
            impossible = _reason(first) in ("", "NoExtension", "NoExtensionBias")
            raise _unusable(constraint, "no answer can meet it" if impossible else _reason(first))
        return Grammar(matcher, self._tokenizer.eos_token_id, vocabulary.vocab_size, constraint.field)

    def _prepare(self, field: str) -> Any:
        """Returns the vocabulary as llguidance knows it."""
        if llguidance is None:
            raise RequestError(
                f"{field} needs llguidance, which is not installed where the server runs: leave it out, or pip install "
                "'mindlora[serve]' there."
            )
        if not getattr(self._tokenizer, "is_fast", False) or self._tokenizer.eos_token_id is None:
            raise RequestError(
                f"{field} needs a tokenizer with a tokenizer.json and an end token, which this model has not: leave it "
                "out."
            )
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = llguidance.hf.from_tokenizer(self._tokenizer)
            return self._vocabulary


def _grammar(constraint: Constraint) -> str:
    """Returns a constraint as llguidance reads it; raises ValueError or RecursionError if it cannot be one."""
    text = constraint.value if isinstance(constraint.value, str) else json.dumps(constraint.value)
    if len(text) > LONGEST:
        raise ValueError(f"it has {len(text)} characters, and {LONGEST} are the limit")
    if constraint.kind == "grammar" and "::=" in text and len(text) > LONGEST_GBNF:
        raise ValueError(f"it has {len(text)} characters, and {LONGEST_GBNF} are the limit in GBNF; Lark may have more")
    if constraint.kind == "json":
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_RULES)
    if constraint.kind == "lark":
        return llguidance.LLMatcher.grammar_from_lark(text)
    return llguidance.grammar_from(constraint.kind, text)


def _unusable(constraint: Constraint, reason: str) -> RequestError:
    return RequestError(f"{constraint.field} cannot be used: {reason}. Correct it, or leave it out.")


def _reason(matcher: Any) -> str:
    return _one_line(matcher.get_error().split("<state>")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300].rstrip(".")
