"""Decoding, for the benchmark serving: one and many adapters against only the base, and NF4 against float32."""

import dataclasses
from typing import Any, Callable, Dict, Iterator, Optional, Sequence

from bench.common import AGAIN, BASE
from bench.serving_engine import Ratio, compare, plain_runner, resident, timed_answers, timed_step
from bench.serving_model import SHAPES, Files, Size, popularity, prompts
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.engine import Engine
from mindlora.serving.runner import ModelRunner

BATCH, NEW_TOKENS = 8, 13
R16 = [f"r16-{number}" for number in range(2 * BATCH)]
R64 = [f"r64-{number}" for number in range(BATCH)]
MIXED = [f"mixed-{number}" for number in range(BATCH)]
RANKS = {
    **dict.fromkeys(R16, 16),
    **dict.fromkeys(R64, 64),
    **{name: 8 * (number + 1) for number, name in enumerate(MIXED)},
}
PLAIN, ONE, ALL_64, MIXED_RANKS = "MindFormers' Linear, no pools", "one adapter", "all of rank 64", "ranks 8 to 64"
# The seed with which eight requests name several adapters by zipf, some of them twice.
_DRAW = 1


def decode(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of steps in float32 and NF4, and of the complete engine in float32."""
    registry = AdapterRegistry(None, files.adapters(size, RANKS))
    for dtype in ("float32", "NF4"):
        engine = files.engine(size, registry, dtype == "NF4", slots=len(RANKS), max_rank=64)
        engine.runner.warm_up()
        plain = plain_runner(files, size, engine.runner.settings) if dtype == "float32" else None
        for context in size.contexts if plain else size.contexts[:1]:
            yield from steps(engine, plain, size, dtype, context)
        engine.start()
        try:
            if plain:
                yield from rates(engine, size)
        finally:
            engine.stop()


def pools(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of a step with eight adapters, with pools in float32 and bfloat16, against the base."""
    names = R16[:BATCH]
    for one in (size, size.wider()):
        registry = AdapterRegistry(None, files.adapters(one, {name: RANKS[name] for name in names}, "bfloat16"))
        sides: Dict[str, Callable[[], float]] = {}
        for dtype in ("float32", "bfloat16"):
            engine = files.engine(one, registry, slots=BATCH, max_rank=16, adapter_dtype=dtype)
            engine.runner.warm_up()
            leases = resident(engine, names)
            step = timed_step(engine.runner, [leases[name] for name in names], one.contexts[0], one)
            sides[f"eight adapters, pools in {dtype}"] = step
        ratios = against_base(dict.fromkeys(sides, "goal: at most 1.05"))
        sides[BASE] = timed_step(engine.runner, [None] * BATCH, one.contexts[0], one)
        title = f"a step of batch {BATCH}, context {one.contexts[0]}, float32, rank 16: {one}"
        yield compare(title, sides, one.rounds, BATCH, ratios, "base: the network with pools, every slot -1")


def steps(
    engine: Engine, plain: Optional[ModelRunner], size: Size, dtype: str, context: int
) -> Iterator[Dict[str, Any]]:
    """Yields the tables of decode steps in an engine that is not started."""
    leases = resident(engine, list(RANKS))

    def step(names: Sequence[Optional[str]], runner: ModelRunner = engine.runner) -> Callable[[], float]:
        return timed_step(runner, [leases[name] if name else None for name in names], context, size)

    def table(batch: int, what: str, of: Dict[str, Sequence[str]], ratios: Dict[str, Ratio]) -> Dict[str, Any]:
        nobody = [None] * batch
        sides = {BASE: step(nobody), AGAIN: step(nobody), **{side: step(names) for side, names in of.items()}}
        if plain:
            sides[PLAIN] = step(nobody, plain)
            ratios = {**ratios, **{f"{side} / {PLAIN}": Ratio(side, PLAIN) for side in (BASE, *of)}}
        title = f"a step of batch {batch}, context {context}, {dtype}; {what}"
        return compare(title, sides, size.rounds, batch, ratios, "base: the network with pools, every slot -1")

    yield table(1, "rank 16 on seven cells a layer", {ONE: R16[:1]}, against_base({ONE: "goal: at most 1.03"}))
    drawn = {shape: popularity(shape, BATCH, R16[:BATCH], _DRAW) for shape in SHAPES}
    labels = {shape: f"{shape} ({len(set(names))} adapters)" for shape, names in drawn.items()}
    goals = {label: "goal: at most 1.05" if shape == "distinct" else "" for shape, label in labels.items()}
    yield table(BATCH, "rank 16", {labels[shape]: names for shape, names in drawn.items()}, against_base(goals))
    ratios = {f"{MIXED_RANKS} / {ALL_64}": Ratio(MIXED_RANKS, ALL_64, "goal: at most 1.0")}
    ratios.update(against_base({ALL_64: "", MIXED_RANKS: ""}))
    yield table(BATCH, "eight adapters", {ALL_64: R64, MIXED_RANKS: MIXED}, ratios)


def against_base(goals: Dict[str, str]) -> Dict[str, Ratio]:
    """Returns the ratio of each side to the base, given side -> goal."""
    return {f"{side} / {BASE}": Ratio(side, BASE, goal) for side, goal in goals.items()}


def rates(engine: Engine, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of the complete, started engine."""
    context = size.contexts[0]

    def side(names: Sequence[Optional[str]]) -> Callable[[], float]:
        return timed_answers(engine, prompts(size, len(names), context), names, NEW_TOKENS)

    def table(batch: int, what: str, of: Dict[str, Sequence[str]], ratios: Dict[str, Ratio]) -> Dict[str, Any]:
        nobody = [None] * batch
        sides = {BASE: side(nobody), AGAIN: side(nobody), **{name: side(names) for name, names in of.items()}}
        title = f"the whole engine, batch {batch}, contexts from {context}, float32; {what}"
        remark = f"each figure the mean of {NEW_TOKENS - 1} steps; base: the same engine, no request names an adapter"
        return compare(title, sides, size.rounds, batch, ratios, remark, warm_up=2)

    eight = "eight adapters"
    yield table(1, "rank 16 on seven cells a layer", {ONE: R16[:1]}, against_base({ONE: "goal: at most 1.03"}))
    yield table(BATCH, "rank 16", {eight: R16[:BATCH]}, against_base({eight: "goal: at most 1.05"}))
    ratios = {f"{MIXED_RANKS} / {ALL_64}": Ratio(MIXED_RANKS, ALL_64, "goal: at most 1.0")}
    yield table(BATCH, eight, {ALL_64: R64, MIXED_RANKS: MIXED}, ratios)


def nf4(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of the complete engine on a base of twice the width, in NF4 and float32, at batch 1.

    The output head is not quantized, and it is large relative to four layers. In the second table, it has the share
    that it would have with 32 layers.
    """
    wide = size.wider()
    for one in (wide, dataclasses.replace(wide, vocabulary=wide.vocabulary // 8)):
        yield _nf4(files, one)


def _nf4(files, size):
    context = size.contexts[0]
    engines = {"float32": files.engine(size), "NF4": files.engine(size, nf4=True)}
    for engine in engines.values():
        engine.start()
    try:
        sides = {
            name: timed_answers(engine, prompts(size, 1, context), [None], NEW_TOKENS)
            for name, engine in engines.items()
        }
        ratios = {"tokens/s, NF4 / float32": Ratio("NF4", "float32", "goal: at least 2", kind="tokens")}
        title = f"the whole engine, batch 1, contexts from {context}, no adapters: {size}"
        remark = "embedding and output head are float32 on both sides"
        return compare(title, sides, size.rounds, 1, ratios, remark, warm_up=2)
    finally:
        for engine in engines.values():
            engine.stop()
