"""Constraints: answers that are JSON of a schema, match a regex, are one of several texts, or follow a grammar.

llguidance (https://github.com/guidance-ai/llguidance) compiles them and decides which tokens may come next.
"""

import dataclasses
import json
import threading
from concurrent import futures
from typing import Any, Dict, FrozenSet, Iterator, List, Mapping, Sequence, Tuple

import numpy as np

from mindlora.core.errors import RequestError

try:
    import llguidance
except ImportError:  # the server's extra installs it; everything else works without it
    llguidance = None

# Maximum length of a constraint in characters, and of one in GBNF, whose conversion takes quadratic time.
LONGEST = 1 << 17
LONGEST_GBNF = 1 << 13
# Bytes of the stack on which a constraint is compiled. llguidance follows references by recursion: a chain of thousands
# of them, which fits into LONGEST, would overflow a thread's 8 MiB and end the process.
_STACK = 1 << 29
# Between the parts of JSON: nothing, a space, or a new line with indentation. A model that may write white space
# without limit sometimes does.
_WHITE_SPACE = r"(\x20|\n\x20{0,40})"
# Options for reading a schema, which override its own ("x-guidance").
_STRICT = {"whitespace_pattern": _WHITE_SPACE, "lenient": False, "coerce_one_of": False}
_LENIENT = {**_STRICT, "lenient": True, "coerce_one_of": True}
# Keywords of a schema whose values have names as keys, and those whose values are not schemas.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "default", "enum", "examples")
_FORBIDDEN = np.float32(-np.inf)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A condition on an answer.

    Attributes:
        kind (str): "json" (``value`` is a JSON schema, as an object or its text), "regex" (the whole answer matches
            it, in the syntax of Rust's regex), "choice" (one of a list of texts), "grammar" (in Lark or GBNF) or
            "lark".
        field (str): The field of the request that sets it, for errors.
        parts (dict): Name -> constraint, which a "lark" refers to as @name.
        strict (bool): Whether a keyword of the schema that cannot be enforced is an error; it is left out otherwise.
    """

    kind: str
    value: Any
    field: str
    parts: Dict[str, "Constraint"] = dataclasses.field(default_factory=dict)
    strict: bool = True


def asked_outputs(outputs: Mapping[str, Any], field: str) -> Iterator[Constraint]:
    """Yields the constraint of each of vLLM's structured outputs that is set: json, regex, choice, grammar, and
    json_object, any JSON object. ``field`` names their field, for errors.
    """
    for kind in ("json", "regex", "choice", "grammar"):
        if outputs.get(kind) is not None:
            yield Constraint(kind, outputs[kind], f"{field}.{kind}")
    if outputs.get("json_object"):
        yield Constraint("json", {"type": "object"}, f"{field}.json_object")


class ConstraintError(RequestError):
    """A constraint that cannot be used; ``field`` is the field of the request that sets it, or a part of it."""

    def __init__(self, message: str, field: str):
        super().__init__(message)
        self.field = field


class Matcher:
    """Decides which tokens may continue one answer; ``ends`` are the tokens that end it."""

    def __init__(self, matcher: Any, vocabulary: Any, ends: FrozenSet[int], field: str):
        self._matcher = matcher
        self._vocab_size = vocabulary.vocab_size
        self._ends = sorted(ends)
        # A grammar can contain these. Other end tokens are text, at which the client wants the answer cut.
        self._marks = [token for token in self._ends if _is_mark(vocabulary, token)]
        self._field = field
        self._followed: List[int] = []

    def mask(self, logits: np.ndarray, generated: Sequence[int]) -> np.ndarray:
        """Returns logits, float32 [vocabulary], as a new array with minus infinity for tokens that may not come next.

        ``generated`` are the tokens of the answer so far; the matcher follows them, even after tokens were taken back.

        Raises RequestError if computing this takes too long, or the answer would end before it is complete.
        """
        self._follow(list(generated))
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._check()
        allowed = np.zeros(len(logits), bool)
        known = min(self._vocab_size, len(logits))
        allowed[:known] = bits[:known]
        if self._matcher.is_accepting():
            allowed[[token for token in self._ends if token < len(logits)]] = True
        else:
            early = [token for token in self._marks if token < known and bits[token] and not self._completes(token)]
            allowed[early] = False
        if not allowed.any():
            raise RequestError(
                f"{self._field} has a token that ends answers in the middle of one: put its name in quotes, as text."
            )
        return np.where(allowed, logits, _FORBIDDEN)

    def _completes(self, token):
        """Returns whether the answer is complete with one more token."""
        after = self._matcher.deep_copy()
        return after.consume_token(token) and after.is_accepting()

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
    """A compiled constraint. Each answer gets its own matcher.

    Attributes:
        loosened (list of str): Parts of constraints without ``strict`` that are not enforced, each with its field.
    """

    def __init__(self, matcher: Any, vocabulary: Any, field: str, loosened: Sequence[str] = ()):
        self.loosened = list(loosened)
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._field = field

    def matcher(self, ends: FrozenSet[int]) -> Matcher:
        """Returns a matcher for an answer that ends with one of the tokens ``ends``."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary, ends, self._field)


class _TextTokens:
    """A vocabulary for llguidance.TokenizerWrapper in which the tokens of a text are text.

    For text that a grammar forces, llguidance takes the tokenizer's own tokens. For the name of a special token that is
    the special token, which no grammar reads as text; here, such text is cut into the longest tokens that are text.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Any):
        self._vocabulary = vocabulary
        self.eos_token_id = vocabulary.eos_token
        self.tokens = [vocabulary.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
        self.special_token_ids = [token for token in range(vocabulary.vocab_size) if _is_mark(vocabulary, token)]

    def __call__(self, text: bytes) -> List[int]:
        tokens = list(self._vocabulary.tokenize_bytes(text))
        if any(_is_mark(self._vocabulary, token) for token in tokens):
            return list(self._vocabulary.greedy_tokenize(text.decode("utf-8")))
        return tokens


def _is_mark(vocabulary: Any, token: int) -> bool:
    """Returns whether a token is not text in a grammar, which refers to it by its name without quotes."""
    return token < vocabulary.vocab_size and vocabulary.is_special_token(token)


class ConstraintCompiler:
    """Compiles constraints for one tokenizer, whose vocabulary it reads, for about a second, at the first constraint.

    Args:
        tokenizer: The result of load_tokenizer.
        extra (str): mindlora's extra that installs llguidance for the caller. Default: "serve".
    """

    # One change of the stack's size at a time, since it applies to the whole process.
    _starting = threading.Lock()

    def __init__(self, tokenizer: Any, extra: str = "serve"):
        self._tokenizer = tokenizer
        self._extra = extra
        self._lock = threading.Lock()
        self._vocabulary: Any = None

    def compile(self, constraint: Constraint, seconds: float = 10.0) -> Grammar:
        """Returns the grammar of a constraint, compiled within ``seconds``.

        Raises ConstraintError if the constraint is not valid, needs features that llguidance cannot
        enforce, is too large, takes too long or can never be met; or if llguidance is missing or cannot use the
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
        except Exception as error:  # for the waiting threads
            compiled.set_exception(error)

    def _compile(self, constraint):
        vocabulary = self._prepare(constraint.field)
        size = sum(len(_text(each)) for each in (constraint, *constraint.parts.values()))
        if size > LONGEST:
            raise _unusable(constraint, f"it has {size} characters, but {LONGEST} are the limit")
        grammars = [_grammar(constraint)]
        loosened = []
        for name, part in constraint.parts.items():
            grammar, left_out = _checked(part, vocabulary)
            grammars.append({**grammar, "name": name})
            loosened += [f"{part.field}: {reason}" for reason in left_out]
        matcher = llguidance.LLMatcher(vocabulary, json.dumps({"grammars": grammars}))
        if matcher.is_error():
            raise _unusable(constraint, _reason(matcher))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_stopped() and not first.is_accepting():
            impossible = _reason(first) in ("", "NoExtension", "NoExtensionBias")
            raise _unusable(constraint, "no answer can meet it" if impossible else _reason(first))
        return Grammar(matcher, vocabulary, constraint.field, loosened)

    def _prepare(self, field: str) -> Any:
        """Returns the vocabulary in llguidance's form."""
        if llguidance is None:
            raise ConstraintError(
                f"{field} needs llguidance, which is not installed where the model runs: leave it out, or pip install "
                f"'mindlora[{self._extra}]' there.",
                field,
            )
        if not getattr(self._tokenizer, "is_fast", False) or self._tokenizer.eos_token_id is None:
            raise ConstraintError(
                f"{field} needs a tokenizer with a tokenizer.json and an end token, which this model lacks: leave it "
                "out.",
                field,
            )
        with self._lock:
            if self._vocabulary is None:
                # Not at the top: it imports transformers, which would delay runs that only train.
                from llguidance.hf import from_tokenizer

                tokens = _TextTokens(from_tokenizer(self._tokenizer))
                self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(tokens))
            return self._vocabulary


def _text(constraint: Constraint) -> str:
    return constraint.value if isinstance(constraint.value, str) else json.dumps(constraint.value)


def _grammar(constraint: Constraint) -> Dict[str, Any]:
    """Returns a constraint as one of llguidance's grammars; raises ConstraintError if it cannot be one."""
    text = _text(constraint)
    is_long = constraint.kind == "grammar" and "::=" in text and len(text) > LONGEST_GBNF
    if is_long:
        reason = f"it has {len(text)} characters, but {LONGEST_GBNF} are the limit in GBNF; Lark may have more"
        raise _unusable(constraint, reason)
    try:
        if constraint.kind == "json":
            rules = _STRICT if constraint.strict else _LENIENT
            return json.loads(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=rules))["grammars"][0]
        if constraint.kind == "regex":
            return json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"][0]
        return {"lark_grammar": llguidance.grammar_from(constraint.kind, text)}
    except (ValueError, RecursionError) as error:
        raise _unusable(constraint, _one_line(str(error))) from error


def _checked(part: Constraint, vocabulary: Any) -> Tuple[Dict[str, Any], List[str]]:
    """Returns the grammar of a part, and its unenforced parts; raises ConstraintError if it cannot be used."""
    left_out: List[str] = []
    if not part.strict:
        part = dataclasses.replace(part, value=_without_patterns(part.value, left_out))
    grammar = _grammar(part)
    matcher = llguidance.LLMatcher(vocabulary, json.dumps({"grammars": [grammar]}))
    if matcher.is_error():
        raise _unusable(part, _reason(matcher))
    return grammar, left_out + [_one_line(warning) for warning in matcher.get_grammar_warnings()]


def _without_patterns(schema: Any, left_out: List[str]) -> Any:
    """Returns a schema without the regular expressions that cannot be enforced, which are added to ``left_out``."""
    if isinstance(schema, list):
        return [_without_patterns(each, left_out) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "pattern" and _is_unusable_pattern(value):
            left_out.append(f"Unusable pattern: {_one_line(value)}")
        elif key in _NAMED and isinstance(value, dict):
            kept[key] = {name: _without_patterns(each, left_out) for name, each in value.items()}
        else:
            kept[key] = value if key in _DATA else _without_patterns(value, left_out)
    named = kept.get("patternProperties")
    unusable = [name for name in named if _is_unusable_pattern(name)] if isinstance(named, dict) else []
    if unusable:
        left_out += [f"Unusable pattern: {_one_line(name)}" for name in unusable]
        kept["patternProperties"] = {name: each for name, each in named.items() if name not in unusable}
        # It would also apply to the properties with these names.
        kept.pop("additionalProperties", None)
    return kept


def _is_unusable_pattern(pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return False
    schema = json.dumps({"type": "string", "pattern": pattern})
    return bool(llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema)))


def _unusable(constraint: Constraint, reason: str) -> ConstraintError:
    message = f"{constraint.field} cannot be used: {reason}. Correct it, or leave it out."
    return ConstraintError(message, constraint.field)


def _reason(matcher: Any) -> str:
    return _one_line(matcher.get_error().split("<state>")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300].rstrip(".")
