"""The parts of a step, for the benchmark serving: attention, products, the border between its graphs, a mask."""

import time
from concurrent import futures
from typing import Any, Callable, Dict, Iterator, List

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn

from bench.serving import THREADS
from bench.serving_engine import Ratio, compare, timed_step
from bench.serving_model import Files, Size, prompts
from mindlora.network.tensors import to_array
from mindlora.ops.multi_lora_linear import MultiLoraLinear
from mindlora.ops.paged_attention import PagedAttention
from mindlora.ops.rounded_linear import RoundedLinear
from mindlora.serving import constraints
from mindlora.serving.network import FEW_TOKENS
from mindlora.serving.request import Part, Request, Sampling
from mindlora.serving.runner import ModelRunner, step_inputs

BLOCK, BATCH = 16, 8
# Number of caches and weights in rotation, so that none stays in the processor's cache.
LAYERS = 8
GOAL = "goal: at most 1.2"
ATTENTION, READ = "paged_attention", "a bare read of its keys and values"
READ_WEIGHTS = "a bare read of its weights"
FEW, MANY = "the graph of few tokens", "the graph of many tokens"
STEP, MASK = "a step without it", "the mask of a constrained token"


def attention(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of decode attention against a read of the cache, with one or four query heads per key head."""
    context = size.contexts[-1]
    head = size.width // size.heads
    for kv_heads in (size.heads, max(1, size.heads // 4)):
        layers = _Attentions(kv_heads, head, context)
        query = Tensor(np.random.default_rng(0).standard_normal((BATCH, size.width), np.float32))
        title = f"attention of a decode step of batch {BATCH}, context {context}, {size.heads} heads of {head}, "
        title += f"{kv_heads} of keys and values, float32"
        yield _against_a_read(title, ATTENTION, READ, _call(layers, query), layers.arrays, size, GOAL)


class _Attentions(nn.Cell):
    """The attentions of LAYERS layers in one graph, each with its own keys and values of BATCH sequences."""

    def __init__(self, kv_heads: int, head: int, context: int):
        super().__init__()
        blocks = -(-context // BLOCK) * BATCH
        rng = np.random.default_rng(0)
        caches = []
        for number in range(2 * LAYERS):
            numbers = rng.standard_normal((blocks, BLOCK, kv_heads, head), np.float32)
            caches.append(Parameter(Tensor(numbers), name=f"cache{number}", requires_grad=False))
        self.keys, self.values = ParameterTuple(caches[:LAYERS]), ParameterTuple(caches[LAYERS:])
        self.arrays = [cache.asnumpy() for cache in caches]
        self.tables = Tensor(np.arange(blocks, dtype=np.int32).reshape(BATCH, -1))
        self.contexts = Tensor(np.full(BATCH, context, np.int32))
        self.counts = Tensor(np.ones(BATCH, np.int32))
        self.new = Tensor(rng.standard_normal((BATCH, kv_heads * head), np.float32))
        self.cos, self.sin = (Tensor(np.full((BATCH, head), value, np.float32)) for value in (0.8, 0.6))
        self.attention = PagedAttention()

    def construct(self, query: Tensor) -> Tensor:
        for keys, values in zip(self.keys, self.values):
            query = self.attention(
                query, self.new, self.new, self.cos, self.sin, keys, values, self.tables, self.contexts, self.counts
            )
        return query


def product(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of a step's linear layers against a read of their weights, in 16 and in 32 bits.

    rounded_linear multiplies in bfloat16, multi_lora_linear in float32.
    """
    width = 2 * size.width
    for op, dtype in (
        ("multi_lora_linear", "bfloat16"),
        ("multi_lora_linear", "float32"),
        ("rounded_linear", "bfloat16"),
    ):
        layers = _Products(width, dtype, op == "rounded_linear")
        for tokens in (1, BATCH):
            x = Tensor(np.random.default_rng(0).standard_normal((tokens, width), np.float32))
            title = f"{LAYERS} products of {tokens} tokens with [{width}, {width}] in {dtype}"
            # With more tokens, the processor's computing speed is the bound.
            goal = GOAL if tokens == 1 else ""
            table = _against_a_read(title, op, READ_WEIGHTS, _call(layers, x), layers.arrays, size, goal)
            seconds = table["seconds"][op]["median"]
            table["more"] = {
                op: {
                    "GB/s a core": sum(array.nbytes for array in layers.arrays) / seconds / 1e9,
                    "GFLOP/s a core": 2 * tokens * LAYERS * width * width / seconds / 1e9,
                }
            }
            yield table


class _Products(nn.Cell):
    """LAYERS square layers without adapters in one graph."""

    def __init__(self, width: int, dtype: str, rounded: bool):
        super().__init__()
        rng = np.random.default_rng(0)
        weights = []
        for number in range(LAYERS):
            numbers = Tensor(rng.standard_normal((width, width), np.float32) / np.float32(width**0.5))
            weights.append(Parameter(numbers.astype(getattr(ms, dtype)), name=f"weight{number}", requires_grad=False))
        self.weights = ParameterTuple(weights)
        self.arrays = [to_array(weight).view(np.int32) for weight in weights]
        self.pool = Tensor(np.zeros((1, 1, 2 * width), np.float32))
        self.ranks, self.scales = Tensor(np.zeros(1, np.int32)), Tensor(np.zeros(1, np.float32))
        self.indices = Tensor(np.full(BATCH, -1, np.int32))
        self.rounded = rounded
        self.linear = RoundedLinear(False, False) if rounded else MultiLoraLinear()

    def construct(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            weight = (weight,) if self.rounded else weight
            x = self.linear(x, weight, self.pool, self.ranks, self.scales, self.indices)
        return x


def _call(layers: nn.Cell, x: Tensor) -> Callable[[], Any]:
    return lambda: layers(x).asnumpy()


def _against_a_read(
    title: str, side: str, read: str, call: Callable[[], Any], arrays: List[np.ndarray], size: Size, goal: str
) -> Dict[str, Any]:
    """Returns the table of a call against a read of its arrays with the same number of threads."""
    with futures.ThreadPoolExecutor(THREADS) as pool:

        def timed_read() -> float:
            begin = time.process_time()
            for array in arrays:
                list(pool.map(np.max, np.array_split(array, THREADS)))
            return time.process_time() - begin

        def timed_call() -> float:
            begin = time.process_time()
            call()
            return time.process_time() - begin

        ratios = {f"{side} / {read}": Ratio(side, read, goal)}
        remark = f"{LAYERS} layers in one graph; a read takes the largest number of each array, in {THREADS} threads"
        sides = {side: timed_call, read: timed_read}
        return compare(title, sides, size.rounds, LAYERS, ratios, remark, "milliseconds of the processor")


def border(files: Files, size: Size) -> Iterator[Dict[str, Any]]:
    """Yields a table for each number of tokens in a step, with both graphs on the same chunk of a prompt."""
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
        """Returns the mean over an answer of random tokens allowed by the schema."""
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
    """Returns a byte-level tokenizer of ``vocabulary`` tokens, trained on random words."""
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
