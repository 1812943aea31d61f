"""What a soak asks, by kind: a table with a function each, which draws the body of a request for a prompt."""

import dataclasses
from typing import Callable, Dict

from mindlora.serving import constraints

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Adapters that write nothing, or embed; each has kinds of its own.
CLASSIFIER, REWARD, EMBEDDER = "soak-classifier", "soak-reward", "soak-embedder"
OBJECT = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": OBJECT}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "g"}}
CALL = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 80, "temperature": 0}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of requests.

    Attributes:
        path (str): Where it is asked.
        draw (callable): A random.Random and a prompt -> the body, but for the model.
        is_of_logits (bool): Whether each token is the likeliest one of the model.
        streams (bool): Whether it can be streamed.
    """

    path: str
    draw: Callable[..., Dict]
    is_of_logits: bool = False
    streams: bool = True


def turn(prompt):
    return {"messages": [{"role": "user", "content": prompt}]}


def greedy(rng):
    return {"max_tokens": rng.randint(3, 32), "temperature": 0, "ignore_eos": True}


def completion(rng, prompt):
    return {"prompt": prompt, **greedy(rng)}


def chat(rng, prompt):
    return {**turn(prompt), **greedy(rng)}


def drawn(rng, prompt):
    return {
        "prompt": prompt,
        "max_tokens": rng.randint(3, 20),
        "temperature": 1.2,
        "top_p": 0.9,
        "seed": rng.randrange(99),
    }


def biased(rng, prompt):
    return {"prompt": prompt, **greedy(rng), "logit_bias": {str(rng.randint(3, 200)): 6.5 for _ in range(3)}}


def echo(rng, prompt):
    return {"prompt": prompt, **greedy(rng), "echo": True, "logprobs": 1}


def scored(rng, prompt):
    return {"prompt": f"x {prompt}", "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 0}


def regex(rng, prompt):
    return {"prompt": prompt, "temperature": 0, "structured_outputs": {"regex": "[0-9]{2}-(cat|dog)s?"}}


def choice(rng, prompt):
    return {**turn(prompt), "temperature": 0, "structured_outputs": {"choice": ["cats", "dogs", "cats and dogs"]}}


def json_schema(rng, prompt):
    return {**turn(prompt), "temperature": 0, "max_tokens": 40, "response_format": FORMAT}


def required_tool(rng, prompt):
    return {**turn(prompt), **CALL, "tool_choice": "required"}


def named_tool(rng, prompt):
    return {**turn(prompt), **CALL, "tool_choice": NAMED}


def tokenize(rng, prompt):
    return {**turn(prompt), "tools": TOOLS}


def text(rng, prompt):
    return {"input": [prompt, f"{prompt}, {rng.choice('abc')}"]}


def pair(rng, prompt):
    return {"text_1": prompt, "text_2": [f"{prompt} {rng.choice('abc')}", "cats"]}


# What every model that writes is asked a plan's number of times, and what once.
OFTEN = {"completion": Kind(COMPLETIONS, completion, is_of_logits=True), "chat": Kind(CHAT, chat, is_of_logits=True)}
ONCE = {
    "drawn completion": Kind(COMPLETIONS, drawn),
    "biased completion": Kind(COMPLETIONS, biased),
    "echo": Kind(COMPLETIONS, echo, is_of_logits=True),
    "scored prompt": Kind(COMPLETIONS, scored),
    "tokens of a chat": Kind("/tokenize", tokenize, streams=False),
}
CONSTRAINED = {
    "regex": Kind(COMPLETIONS, regex),
    "choice": Kind(CHAT, choice),
    "JSON schema": Kind(CHAT, json_schema),
    "required tool": Kind(CHAT, required_tool),
    "named tool": Kind(CHAT, named_tool),
}
# Name of the adapter -> what it is asked.
READ = {
    CLASSIFIER: {"classes": Kind("/v1/classify", text, streams=False)},
    REWARD: {"rewards": Kind("/v1/score", pair, streams=False)},
    EMBEDDER: {
        "embeddings": Kind("/v1/embeddings", text, streams=False),
        "cosines": Kind("/v1/score", pair, streams=False),
    },
}


def once():
    """Returns what every model that writes is asked once: without llguidance, nothing with a constraint."""
    return {**ONCE, **({} if constraints.llguidance is None else CONSTRAINED)}
