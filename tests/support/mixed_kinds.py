"""What mixed requests ask: a table of kinds with a function each, and how an answer differs from that of one alone."""

import dataclasses
import itertools
import json
import re
from typing import Callable, Dict, List, Optional

import numpy as np

from mindlora.serving import constraints
from mindlora.serving.constraints import Constraint, ConstraintCompiler
from mindlora.serving.request import Reading
from tests.support.tiny_serving import tokenizer, vocabulary

# Two logits that are nearer than this are a tie: rounding may let either win.
TIE = 1e-3
# Between the numbers of the same request in another batch, which may be computed by another graph.
CLOSE = {"rtol": 1e-4, "atol": 2e-4}
CHOICES = ("cats", "dogs", "cats and dogs")
REGEX = "[0-9]{2}-(cat|dog)s?"
SCHEMA = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of requests.

    Attributes:
        draw (callable): A random.Random -> fields of Sampling beside those of a greedy answer.
        is_of_logits (bool): Whether each token is the likeliest one of the model, whatever came before.
        constraint (Constraint or None): What an answer must be.
        meets (callable): Returns whether a text that has come to its end is that.
        is_of_classes (bool): Whether a classifier is asked.
    """

    draw: Callable[..., Dict]
    is_of_logits: bool = False
    constraint: Optional[Constraint] = None
    meets: Callable[[str], bool] = lambda text: True
    is_of_classes: bool = False


def greedy(rng):
    return {}


def drawn(rng):
    return {"temperature": rng.choice([0.7, 1.7]), "top_p": 0.9, "top_k": 50, "seed": rng.randrange(1 << 31)}


def penalized(rng):
    return {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}


def biased(rng):
    tokens = rng.sample(range(3, vocabulary()), 4)
    return {"logit_bias": tuple((token, rng.uniform(-9, 9)) for token in tokens)}


def reported(rng):
    return {"logprobs": 3}


def stopped(rng):
    return {"stop": (rng.choice("aeit "),), "ignore_eos": False}


def echoed(rng):
    return {"prompt_logprobs": 2, "logprobs": 2}


def scored(rng):
    return {"max_tokens": 0, "prompt_logprobs": 1, "scored_from": rng.choice([1, 1, 9])}


def constrained(rng):
    draws = {"temperature": 1.0, "seed": rng.randrange(1 << 31)}
    return {"ignore_eos": False, **rng.choice([{}, draws])}


def embedded(rng):
    return {"max_tokens": 0, "reading": Reading(False, rng.random() < 0.5)}


def classified(rng):
    return {"max_tokens": 0, "reading": Reading(True, rng.random() < 0.5)}


def is_json(text):
    return set(json.loads(text)) == {"x"}


KINDS = {
    "greedy": Kind(greedy, is_of_logits=True),
    "drawn": Kind(drawn),
    "penalized": Kind(penalized),
    "biased": Kind(biased),
    "reported": Kind(reported, is_of_logits=True),
    "stopped": Kind(stopped, is_of_logits=True),
    "echoed": Kind(echoed, is_of_logits=True),
    "scored": Kind(scored),
    "json": Kind(constrained, constraint=Constraint("json", SCHEMA, "json"), meets=is_json),
    "regex": Kind(constrained, constraint=Constraint("regex", REGEX, "regex"), meets=re.compile(REGEX).fullmatch),
    "choice": Kind(constrained, constraint=Constraint("choice", list(CHOICES), "choice"), meets=CHOICES.__contains__),
    "embedded": Kind(embedded),
    "classified": Kind(classified, is_of_classes=True),
}


def known():
    """Returns the names of the kinds that can be asked: without llguidance, of those without a constraint."""
    return [name for name, kind in KINDS.items() if kind.constraint is None or constraints.llguidance is not None]


def grammars(kinds):
    """Returns kind -> compiled constraint, of those kinds that have one."""
    compiler = ConstraintCompiler(tokenizer())
    return {name: compiler.compile(KINDS[name].constraint) for name in kinds if KINDS[name].constraint}


def differences(answer, alone) -> List[str]:
    """Returns how an answer, which may have been cancelled, differs from that of the same request alone.

    ``alone`` reports the log-probabilities of all tokens, by which a tie shows.
    """
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(answer.tokens, alone.tokens)))
    if same < len(answer.tokens):
        is_tie = same < len(alone.tokens) and _is_tie(alone.logprobs[same], answer.tokens[same])
        return [] if is_tie else [f"alone it is {alone.tokens}, with others {answer.tokens}"]
    found = _numbers(answer, alone)
    if answer.reason == "cancelled":
        return found
    if (answer.reason, answer.tokens, answer.text) != (alone.reason, alone.tokens, alone.text):
        found.append(
            f"alone it ends as {alone.reason} with {alone.text!r}, with others {answer.reason} {answer.text!r}"
        )
    if answer.reason == "stop" and not KINDS[answer.job.kind].meets(answer.text):
        found.append(f"{answer.text!r} is not what was asked for")
    return found


def _is_tie(entry, token):
    likeliness = dict(entry.top)
    return abs(likeliness[entry.token] - likeliness[token]) < TIE


def _numbers(answer, alone):
    """Returns which numbers of an answer are not near those of the request alone."""
    pairs = {
        "log-probabilities": list(zip(answer.logprobs, alone.logprobs)),
        "log-probabilities of the prompt": list(zip(answer.prompt_logprobs, alone.prompt_logprobs)),
    }
    found = [name for name, entries in pairs.items() if not all(_are_near(*pair) for pair in entries)]
    if answer.vectors is not None and not np.allclose(answer.vectors, alone.vectors, **CLOSE):
        found.append("vectors")
    return [f"its {name} are not those of the request alone" for name in found]


def _are_near(entry, other):
    if entry.logprob is None or other.logprob is None:
        return entry.logprob is other.logprob
    values = [[one.logprob, *(value for _, value in one.top)] for one in (entry, other)]
    count = min(map(len, values))
    return np.allclose(values[0][:count], values[1][:count], **CLOSE)
