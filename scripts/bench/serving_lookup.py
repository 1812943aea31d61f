"""Prompt lookup, for the benchmark serving: answers that copy their prompt, with and without drafts."""

import os
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
from safetensors.numpy import load_file, save_file

from bench.serving_engine import Ratio, answer, compare
from bench.serving_model import Files, Size
from mindlora.serving.engine import Engine

# Number of drafted tokens at a time, and of tokens in an answer.
DRAFTS, NEW_TOKENS = 8, 64
# The model counts: each token is followed by the next, and the last of this many by the first.
CYCLE = 96
OFF = "one token a step"


def lookup(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of the complete engine with prompt lookup against without."""
    engine = files.engine(size, checkpoint=_counting_base(files, size), seq_length=2 * CYCLE + NEW_TOKENS)
    engine.start()
    try:
        for batch in (1, 8):
            for task, goal, prompt in (
                ("answers repeat the prompt", "goal: at least 1.5", _repeated),
                ("answers repeat the prompt, of which every tenth token was another", "goal: at least 1.5", _edited),
                ("answers copy nothing", "", _new),
            ):
                prompts = [prompt(np.random.default_rng(number), size, CYCLE * number) for number in range(batch)]
                sides = {OFF: _timed(engine, prompts, 0), _on(): _timed(engine, prompts, DRAFTS)}
                before = engine.snapshot()
                ratios = {f"tokens/s, {_on()} / {OFF}": Ratio(_on(), OFF, goal, kind="tokens")}
                title = f"the whole engine, batch {batch}, prompts of {CYCLE + CYCLE // 4}, float32; {task}"
                remark = "a model that counts; both sides gave the same tokens"
                table = compare(title, sides, size.rounds, batch, ratios, remark, "milliseconds of a token", warm_up=2)
                after = engine.snapshot()
                drafted = after.drafted_tokens - before.drafted_tokens
                accepted = after.accepted_tokens - before.accepted_tokens
                table["more"] = {_on(): {"drafted": drafted, "right": accepted}}
                yield table
    finally:
        engine.stop()


def _on() -> str:
    return f"prompt lookup of {DRAFTS}"


def _counting_base(files: Files, size: Size) -> str:
    """Returns a folder with a counting model of the same size and cost: its layers add nothing to an embedding."""
    path = os.path.join(files.folder, f"counting-{size.key}")
    os.makedirs(path)
    base = files.base(size)
    tensors = load_file(os.path.join(base, "model.safetensors"))
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
    tokens = np.arange(size.vocabulary)
    following = np.where(tokens % CYCLE == CYCLE - 1, tokens - CYCLE + 1, tokens + 1)
    following = np.minimum(following, size.vocabulary - 1)
    tensors["lm_head.weight"][following] = tensors["model.embed_tokens.weight"]
    save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})
    os.link(os.path.join(base, "config.json"), os.path.join(path, "config.json"))
    return path


def _repeated(rng: np.random.Generator, size: Size, first: int) -> List[int]:
    counted = np.arange(first, first + CYCLE)
    return [*counted.tolist(), *counted[: CYCLE // 4].tolist()]


def _edited(rng: np.random.Generator, size: Size, first: int) -> List[int]:
    prompt = np.array(_repeated(rng, size, first))
    prompt[5:CYCLE:10] = rng.integers(0, size.vocabulary, len(prompt[5:CYCLE:10]))
    return prompt.tolist()


def _new(rng: np.random.Generator, size: Size, first: int) -> List[int]:
    return [*rng.permutation(size.vocabulary)[: CYCLE + CYCLE // 4 - 1].tolist(), first]


def _timed(engine: Engine, prompts: List[List[int]], drafts: int) -> Callable[[], float]:
    """Returns a function that makes the engine answer, and returns the seconds per answer token."""

    def run() -> float:
        engine.scheduler.prompt_lookup = drafts
        made = answer(engine, prompts, [None] * len(prompts), [NEW_TOKENS] * len(prompts))
        expected = [[_after(prompt[-1], place) for place in range(NEW_TOKENS)] for prompt in prompts]
        if made.tokens != expected:
            raise AssertionError(f"with {drafts} drafts the answers are not the model's: {made.tokens}")
        begin = max(times[0] for times in made.times)
        return (max(times[-1] for times in made.times) - begin) / (NEW_TOKENS - 1)

    return run


def _after(token: int, place: int) -> int:
    return token // CYCLE * CYCLE + (token + 1 + place) % CYCLE
