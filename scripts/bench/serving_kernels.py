"""What a step is made of, for the benchmark serving: attention, the border of its two graphs, a constraint's mask."""

import time
from concurrent import futures
from typing import Any, Callable, Dict, Iterator, List

import numpy as np
from mindspore import Parameter, Tensor

from bench.serving import THREADS
from bench.serving_engine import Ratio, compare, timed_step
from bench.serving_model import Files, Size, prompts
from mindlora.ops.paged_attention import PagedAttention
from mindlora.serving import constraints
from mindlora.serving.network import FEW_TOKENS
from mindlora.serving.request import Part, Request, Sampling
from mindlora.serving.runner import ModelRunner, step_inputs

BLOCK, BATCH = 16, 8
# Caches that take turns, so that none of them is in the processor's own cache.
LAYERS = 8
ATTENTION, READ = "paged_attention", "a bare read of its keys and values"
FEW, MANY = "the graph of few tokens", "the graph of many tokens"
STEP, MASK = "a step without it", "the mask of a constrained token"


def attention(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of decode attention against a read of the cache, a head for each query head and for four."""
    context = size.contexts[-1]
    head = size.width // size.heads
    for kv_heads in (size.heads, max(1, size.heads // 4)):
        layers = [_Layer(size.heads, kv_heads, head, context, number) for number in range(LAYERS)]
        with futures.ThreadPoolExecutor(THREADS) as pool:
            sides = {ATTENTION: _each(layers, _Layer.attend), READ: _each(layers, lambda layer: layer.read(pool))}
            ratios = {f"{ATTENTION} / {READ}": Ratio(ATTENTION, READ, "goal: at most 1.2")}
            title = f"attention of a decode step of batch {BATCH}, context {context}, {size.heads} heads of {head}, "
            title += f"{kv_heads} of keys and values, float32"
            remark = f"{LAYERS} caches in turn; a read takes the largest number of each, in {THREADS} threads"
            yield compare(
                title,
                sides,
                size.rounds,
                BATCH * LAYERS,
                ratios,
                remark,
                f"milliseconds of the processor, {LAYERS} calls",
            )


class _Layer:
    """Keys and values of BATCH sequences, and a query for each."""

    def __init__(self, heads: int, kv_heads: int, head: int, context: int, seed: int):
        blocks = -(-context // BLOCK) * BATCH
        rng = np.random.default_rng(seed)
        self._caches = [
            Parameter(Tensor(rng.standard_normal((blocks, BLOCK, kv_heads, head), np.float32)), name=name)
            for name in ("keys", "values")
        ]
        self._arrays = [cache.asnumpy() for cache in self._caches]
        self._inputs = [
            Tensor(rng.standard_normal((BATCH, heads * head), np.float32)),
            *self._caches,
            Tensor(np.arange(blocks, dtype=np.int32).reshape(BATCH, -1)),
            Tensor(np.full(BATCH, context, np.int32)),
            Tensor(np.ones(BATCH, np.int32)),
        ]
        self._cell = PagedAttention()

    def attend(self) -> None:
        self._cell(*self._inputs).asnumpy()

    def read(self, pool: futures.Executor) -> None:
        for array in self._arrays:
            list(pool.map(np.max, np.array_split(array, THREADS)))


def _each(layers: List[_Layer], call: Callable[[_Layer], None]) -> Callable[[], float]:
    def run() -> float:
        begin = time.process_time()
        for layer in layers:
            call(layer)
        return time.process_time() - begin

    return run


def border(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields a table for each number of tokens in a step: both graphs with the same chunk of a prompt."""
    engine = files.engine(size, seq_length=512, max_running=1)
    engine.runner.warm_up()
    for tokens in (1, 16, 32, 48, FEW_TOKENS, 96, 128):
        sides = {FEW: _timed_chunk(engine.runner, size, tokens, True)}
        sides[MANY] = _timed_chunk(engine.runner, size, tokens, False)
        goal = "goal: at most 1, the border is above" if tokens <= FEW_TOKENS else "goal: at least 1, it is below"
        ratios = {f"{FEW} / {MANY}": Ratio(FEW, MANY, goal)}
        title = f"a step of {tokens} tokens of one prompt after 128 others, float32"
        remark = f"the runner takes the first up to {FEW_TOKENS} tokens"
        yield compare(title, sides, size.rounds, tokens, ratios, remark)


def _timed_chunk(runner: ModelRunner, size: Size, tokens: int, few: bool) -> Callable[[], float]:
    (prompt,) = prompts(size, 1, 128 + tokens)
    request = Request(prompt, Sampling(), computed=128)
    request.blocks = list(range(runner.settings.blocks_per_request))
    inputs = step_inputs([Part(request, 128, tokens)], runner.settings.block_size, runner.settings.blocks_per_request)

    def run() -> float:
        begin = time.perf_counter()
        runner._run(inputs, few)
        return time.perf_counter() - begin

    return run


def mask(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the table of a constrained token's mask against a decode step of batch 1."""
    if constraints.llguidance is None:
        print("mask is left out: llguidance is not installed.")
        return
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
    tokenizer = _tokenizer(size.vocabulary)
    grammar = constraints.ConstraintCompiler(tokenizer).compile(
        constraints.Constraint("json", schema, "response_format")
    )
    engine = files.engine(size, max_running=1)
    engine.runner.warm_up()
    rng = np.random.default_rng(0)

    def masked() -> float:
        """Returns the mean over an answer of random tokens that the schema allows."""
        matcher = grammar.matcher(frozenset([tokenizer.eos_token_id]))
        generated: List[int] = []
        seconds = 0.0
        while len(generated) < 40 and tokenizer.eos_token_id not in generated:
            logits = rng.standard_normal(size.vocabulary, np.float32)
            begin = time.perf_counter()
            allowed = matcher.mask(logits, generated)
            seconds += time.perf_counter() - begin
            generated.append(int(allowed.argmax()))
        return seconds / len(generated)

    sides = {STEP: timed_step(engine.runner, [None], size.contexts[0], size), MASK: masked}
    ratios = {f"{MASK} / {STEP}": Ratio(MASK, STEP, "goal: at most 0.03")}
    title = f"a step of batch 1, context {size.contexts[0]}, float32, vocabulary {size.vocabulary}, and a JSON schema"
    yield compare(title, sides, size.rounds, 1, ratios, "answers are random tokens that the schema allows")


def _tokenizer(vocabulary: int) -> Any:
    """Returns a byte-level tokenizer of so many tokens, learned from random words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 10))) for _ in range(4 * vocabulary)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(words)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
