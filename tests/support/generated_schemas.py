"""Random JSON schemas that an answer of some two hundred tokens can meet, and answers drawn under a constraint."""

import random

import numpy as np

from mindlora.serving.request import Sampling
from mindlora.serving.sampling import Sampler

PATTERNS = ("^[a-z]{1,4}$", "^\\d{3}-\\d{2}$", "^(ab|c){1,3}$", "^[A-Z][a-z]?$", "^x?$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
VALUES = ("a", 'b"c', "é\n", 1, 2.5, None, True, {"x": [1]}, [], "0", "\\")
NAMES = ("a", "b", "name", "with space", "ü", 'q"', "$x", "1")
LEAVES = ("string", "integer", "number", "boolean", "null", "enum", "const")


def schema(rng, depth=0):
    """Returns a schema; ``rng`` is a random.Random."""
    inner = ("object", "array", "anyOf")
    kind = rng.choice(inner if depth == 0 else LEAVES if depth == 3 else LEAVES + inner * 2)
    return _MAKERS[kind](rng, depth)


def _string(rng, _):
    least = rng.randrange(4)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randrange(5)},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
        ]
    )


def _integer(rng, _):
    least = rng.randrange(-1000, 1000)
    return rng.choice(
        [
            {"type": "integer", "minimum": least, "maximum": least + rng.randrange(500)},
            {"type": "integer", "exclusiveMinimum": least, "maximum": least + 1 + rng.randrange(50)},
            {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": rng.choice([2, 5, 7])},
        ]
    )


def _number(rng, _):
    least = rng.randrange(-50, 50) + rng.choice([0, 0.5, 0.25])
    return {"type": "number", "minimum": least, "maximum": least + rng.randrange(1, 9)}


def _array(rng, depth):
    least = rng.randrange(3)
    made = {"type": "array", "items": schema(rng, depth + 1), "minItems": least, "maxItems": least + rng.randrange(3)}
    if rng.random() < 0.3:
        made["prefixItems"] = [schema(rng, depth + 1) for _ in range(rng.randrange(1, 3))]
    return made


def _object(rng, depth):
    names = rng.sample(NAMES, rng.randrange(5))
    return {
        "type": "object",
        "properties": {name: schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


_MAKERS = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda rng, depth: {"type": "boolean"},
    "null": lambda rng, depth: {"type": "null"},
    "enum": lambda rng, depth: {"enum": rng.sample(VALUES, rng.randrange(1, 5))},
    "const": lambda rng, depth: {"const": rng.choice(VALUES)},
    "anyOf": lambda rng, depth: {"anyOf": [schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]},
    "array": _array,
    "object": _object,
}


def answer(grammar, tokenizer, seed, longest=4000, **sampling):
    """Returns the text of an answer that random logits give under a grammar, and whether it came to its end."""
    rng = np.random.default_rng(seed)
    end = tokenizer.eos_token_id
    sampler = Sampler(Sampling(grammar=grammar, seed=seed, **sampling), [1], ends=frozenset({end}))
    likely = np.zeros(len(tokenizer), np.float32)
    likely[end] = 4.0
    tokens = []
    while len(tokens) < longest:
        logits = likely + rng.normal(size=len(tokenizer)).astype(np.float32)
        token = sampler.sample(logits, tokens).token
        if token == end:
            return tokenizer.decode(tokens, clean_up_tokenization_spaces=False), True
        tokens.append(token)
    return tokenizer.decode(tokens), False


def schemas(count, seed=0):
    """Yields random schemas."""
    rng = random.Random(seed)
    for _ in range(count):
        yield schema(rng)
