"""The cases of scripts/verify_npu_operators.py: each operator on odd shapes and numbers, with the expected results."""

import dataclasses
import os
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from verify_npu_run import ROOT

from mindlora.core.numerics.dtypes import from_float32, named_dtype, to_float32
from mindlora.ops import (
    LoraDelta,
    LoraLinear,
    LoraLinearWithBias,
    MultiLoraDelta,
    MultiLoraSlotWrite,
    Nf4Linear,
    Nf4LinearWithBias,
    quantize,
)

# These cases and those that CANN calls without MindSpore share one definition of correct results.
sys.path.insert(0, os.path.join(ROOT, "ops", "ascendc_check"))
import bounds  # noqa: E402
from bounds import Span, exact, rounded  # noqa: E402
from golden import reference  # noqa: E402

SCALE = 0.75
# An infinity or NaN in y0 may spoil this many neighbours in its row (ops/lora_delta/README.md).
NEIGHBOURS = 15


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The tested shapes: every number of tokens and rank with every pair of widths (K, N)."""

    tokens: Sequence[int] = (1, 3, 8, 17, 64, 512)
    ranks: Sequence[int] = (1, 5, 8, 16, 64)
    widths: Sequence[Tuple[int, int]] = ((37, 53), (130, 16), (1000, 267), (2048, 2048))

    def all(self) -> Iterator[Tuple[int, int, int, int]]:
        """Yields (tokens, K, N, rank), small ones first."""
        for k, n in self.widths:
            for rank in self.ranks:
                for tokens in self.tokens:
                    yield tokens, k, n, rank


QUICK = Sizes((1, 17), (1, 5), ((37, 53),))


@dataclasses.dataclass
class Case:
    """One call of an operator.

    Attributes:
        title (str): The shapes, and the peculiarity of the numbers.
        run (Callable): Returns the operator's results, a list of arrays.
        spans (list of Span): The range in which each array must lie.
        may_spoil (ndarray or None): The positions in the first result where a number need not be finite.
    """

    title: str
    run: Callable[[], List[np.ndarray]]
    spans: List[Span]
    may_spoil: Any = None


def kept(dtype: str, kernel: bool) -> Tuple[str, ...]:
    """Returns the dtypes in which a forward may keep the rank-r tensor: float32 on a CPU, either one in a kernel."""
    return ("float32", dtype) if kernel else ("float32",)


def called(cell: nn.Cell, inputs: Sequence[Tensor]) -> Callable[[], List[np.ndarray]]:
    """Returns a function that calls a cell with one output."""
    return lambda: [values(cell(*inputs))]


def differentiated(cell: nn.Cell, inputs: Sequence[Tensor], dy: Tensor, at: Sequence[int]) -> Callable:
    """Returns a function that computes the gradients of a cell for its inputs at the places ``at``."""

    def run():
        grads = ms.ops.GradOperation(get_all=True, sens_param=True)(cell)(*inputs, dy)
        return [values(grads[i]) for i in at]

    return run


def lora_delta(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """y0 + scale x A^T B^T, its gradients, and NaN and infinity in one number of y0 or of x."""
    oracle, cell, scale = reference("lora_delta"), LoraDelta(), Tensor(SCALE, ms.float32)

    def arrays(tokens, k, n, rank):
        return [
            normal(*shape, seed=i, dtype=dtype)
            for i, shape in enumerate(((tokens, n), (tokens, k), (rank, k), (n, rank)))
        ]

    for tokens, k, n, rank in sizes.all():
        y0, *pair = given = arrays(tokens, k, n, rank)
        inputs, title = [*(tensor(array, dtype) for array in given), scale], shape_title(tokens, k, n, rank)
        wanted = oracle.lora_delta(*given, SCALE)
        span = bounds.low_rank(wanted, np.abs(y0), *pair, SCALE, dtype, kept(dtype, kernel))
        yield Case(title, called(cell, inputs), [span])
        if tokens in sizes.tokens[1:3] and k <= 1000:
            dy = normal(tokens, n, seed=9, dtype=dtype)
            spans = gradients(oracle.lora_delta_grad(dy, *pair, SCALE)[1:4], dy, *pair, dtype)
            run = differentiated(cell, inputs, tensor(dy, dtype), range(4))
            yield Case(f"gradients, {title}", run, [exact(dy), *spans])
    tokens, (k, n), rank = 17, sizes.widths[0], 5
    # NaN comes last: on the cube cores, it may cause an execution error.
    for number in (np.inf, np.nan):
        for place, name in ((0, "y0"), (1, "x")):
            given = arrays(tokens, k, n, rank)
            given[place][3, 20] = number
            spoiled = np.zeros((tokens, n), bool)
            spoiled[3, 20 - NEIGHBOURS : 20 + NEIGHBOURS + 1] = True
            if place == 1:
                spoiled[3] = True
            inputs = [*(tensor(array, dtype) for array in given), scale]
            title = f"{number} in one number of {name}, {shape_title(tokens, k, n, rank)}"
            with np.errstate(invalid="ignore", over="ignore"):
                wanted = oracle.lora_delta(*given, SCALE)
                span = bounds.low_rank(wanted, np.abs(given[0]), *given[1:], SCALE, dtype, kept(dtype, kernel))
            # A separate cell: MindSpore refuses to run a graph in which a launch has failed.
            yield Case(title, called(LoraDelta(), inputs), [span], may_spoil=spoiled)


def gradients(
    wanted: Sequence[np.ndarray],
    dy: np.ndarray,
    x: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    dtype: str,
    w: Optional[np.ndarray] = None,
) -> List[Span]:
    """Returns the spans of dx, dA and dB; with a W, those of lora_linear.

    MindSpore's own operators compute them: each product is rounded, and again after scaling.
    """
    of_dy, of_x = np.abs(dy @ b) * SCALE, np.abs(x @ a.T) * SCALE
    rest, of_rest = (0, 0) if w is None else (np.abs(dy) @ np.abs(w), np.abs(dy @ w) + np.abs(dy @ b @ a) * SCALE)
    x, a, b, dy = map(np.abs, (x, a, b, dy))
    sums_of_dy, sums_of_x = dy @ b * SCALE, x @ a.T * SCALE
    return [
        rounded(wanted[0], rest + sums_of_dy @ a, dtype, of_rest + 2 * of_dy @ a),
        rounded(wanted[1], sums_of_dy.T @ x, dtype, 2 * of_dy.T @ x),
        rounded(wanted[2], dy.T @ sums_of_x, dtype, 2 * dy.T @ of_x),
    ]


def lora_linear(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """x W^T + scale x A^T B^T, with and without bias, its gradients, and NaN in one number of x."""
    oracle, plain, biased = reference("lora_linear"), LoraLinear(), LoraLinearWithBias()
    scale = Tensor(SCALE, ms.float32)

    def arrays(tokens, k, n, rank):
        shapes = ((tokens, k), (n, k), (rank, k), (n, rank), (n,))
        return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]

    def span(given, bias=None):
        x, w, a, b = given
        rest = np.abs(x) @ np.abs(w).T + (0 if bias is None else np.abs(bias))
        wanted = oracle.lora_linear(*given, SCALE, bias)
        return bounds.low_rank(wanted, rest, x, a, b, SCALE, dtype, kept(dtype, kernel))

    for tokens, k, n, rank in sizes.all():
        *given, bias = arrays(tokens, k, n, rank)
        inputs, title = [*(tensor(array, dtype) for array in given), scale], shape_title(tokens, k, n, rank)
        with_bias = [*inputs, tensor(bias, dtype)]
        yield Case(title, called(plain, inputs), [span(given)])
        yield Case(f"bias, {title}", called(biased, with_bias), [span(given, bias)])
        if tokens in sizes.tokens[1:3] and k <= 1000:
            dy = normal(tokens, n, seed=9, dtype=dtype)
            run = differentiated(biased, with_bias, tensor(dy, dtype), (0, 2, 3, 5))
            *wanted, dbias = oracle.lora_linear_grad(dy, *given, SCALE)
            x, w, a, b = given
            added = np.abs(dy).sum(axis=0)
            spans = [*gradients(wanted, dy, x, a, b, dtype, w), rounded(dbias, added, dtype, added)]
            yield Case(f"gradients, {title}", run, spans)
    tokens, (k, n), rank = 17, sizes.widths[0], 5
    *given, bias = arrays(tokens, k, n, rank)
    given[0][3, 20] = np.nan
    inputs = [*(tensor(array, dtype) for array in given), scale]
    yield Case(f"nan in one number of x, {shape_title(tokens, k, n, rank)}", called(plain, inputs), [span(given)])


def multi_lora_delta(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """Rows with adapters of every rank, an empty slot and none; NaN in unused parts of the pool."""
    oracle, cell = reference("multi_lora_delta"), MultiLoraDelta()
    ranks = np.int32([*sizes.ranks, 0, 33])
    for k, n in sizes.widths:
        pool = normal(len(ranks), 64, k + n, seed=3, dtype=dtype)
        for block, rank in zip(pool, ranks):
            block[rank:] = np.nan
        scales = np.linspace(-1, 1.5, len(ranks)).astype(np.float32)
        held = [tensor(pool, dtype), Tensor(ranks), Tensor(scales)]
        for tokens in sizes.tokens:
            y0, x = normal(tokens, n, seed=1, dtype=dtype), normal(tokens, k, seed=2, dtype=dtype)
            for kind, indices in users(tokens, len(ranks), len(sizes.ranks), kernel).items():
                given = (y0, x, pool, ranks, scales, indices)
                wanted = beyond_is_nan(oracle.multi_lora_delta, *given)
                span = bounds.of_slots(wanted, *given, dtype, kept(dtype, kernel))
                inputs = [tensor(y0, dtype), tensor(x, dtype), *held, Tensor(indices)]
                yield Case(f"{tokens} tokens, {k} to {n}, adapters: {kind}", called(cell, inputs), [span])


def users(tokens: int, slots: int, empty: int, kernel: bool) -> Dict[str, np.ndarray]:
    """Returns several assignments of slots to tokens; only a kernel takes a slot beyond the pool."""
    rng = np.random.default_rng(tokens)
    drawn, none = rng.integers(0, slots, tokens), -1 - rng.integers(0, 9, tokens)
    ways = {
        "distinct": np.arange(tokens) % slots,
        "zipf": np.minimum(rng.zipf(1.5, tokens) - 1, slots - 1),
        "skipped": np.where(rng.random(tokens) < 0.5, none, drawn),
        "none": np.full(tokens, -1),
        "empty": np.full(tokens, empty),
    }
    if kernel:
        ways["beyond the pool"] = np.where(np.arange(tokens) == 0, slots, 0)
    return {way: indices.astype(np.int32) for way, indices in ways.items()}


def beyond_is_nan(oracle: Callable, y0, x, pool, ranks, scales, indices) -> np.ndarray:
    """Returns the expected multi_lora_delta; a row with a slot beyond the pool is NaN."""
    beyond = indices >= len(ranks)
    wanted = oracle(y0, x, pool, ranks, scales, np.where(beyond, -1, indices))
    wanted[beyond] = np.nan
    return wanted


def multi_lora_slot_write(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """Adapters of every rank written to the first and the last slot; no other bit may change."""
    oracle, cell, slots, most = reference("multi_lora_slot_write"), MultiLoraSlotWrite(), 4, 64
    for k, n in sizes.widths:
        for rank in sizes.ranks:
            for slot in (0, slots - 1, *((slots,) if kernel else ())):
                before = [normal(slots, most, k + n, dtype=dtype), np.int32([1, 2, 0, 64]), np.float32([1, 2, 3, 4])]
                wanted, packed = [array.copy() for array in before], normal(rank, k + n, seed=1, dtype=dtype)
                if slot < slots:
                    oracle.multi_lora_slot_write(*wanted, slot, packed, SCALE)
                wanted.append(np.int32([slot if slot < slots else -1]))
                run = written(cell, before, slot, tensor(packed, dtype), dtype)
                yield Case(f"rank {rank}, {k} + {n}, slot {slot} of {slots}", run, list(map(exact, wanted)))


def written(cell: nn.Cell, before: List[np.ndarray], slot: int, packed: Tensor, dtype: str) -> Callable:
    """Returns a function that writes into new Parameters and returns them and the operator's result."""

    def run():
        pool, ranks, scales = map(Parameter, (tensor(before[0], dtype), Tensor(before[1]), Tensor(before[2])))
        out = cell(pool, ranks, scales, Tensor([slot], ms.int32), packed, Tensor(SCALE, ms.float32))
        # Rows beyond an adapter's rank have no meaning; plain operators clear them.
        after = values(pool)
        if slot < len(after):
            after[slot, packed.shape[0] :] = before[0][slot, packed.shape[0] :]
        return [after, ranks.asnumpy(), scales.asnumpy(), out.asnumpy()]

    return run


def nf4_linear(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """x W^T with a 4-bit W, with and without bias, its gradients, and NaN in one number of x.

    On an NPU, the kernel rounds W to the dtype, and MindSpore's MatMul rounds the product before adding the bias.
    """
    oracle, plain, biased = reference("nf4_dequantize"), Nf4Linear(), Nf4LinearWithBias()

    def span(x, weight, bias=None):
        y, sums = x.astype(np.float64) @ weight.T, np.abs(x) @ np.abs(weight).T
        if bias is None:
            return rounded(y, sums, dtype)
        return rounded(y + bias, sums + np.abs(bias), dtype, np.abs(y) * kernel)

    for k, n in sizes.widths:
        array = quantize(normal(n, k, seed=1) * np.linspace(0.5, 1.5, n * k).reshape(n, k).astype(np.float32))
        parts = [array.codes, array.absmax, array.scales, array.offsets]
        bias, held = normal(n, seed=4, dtype=dtype), list(map(Tensor, parts))
        weight = bounds.held(oracle.nf4_dequantize(*parts, k), dtype if kernel else "float32")
        for tokens in sizes.tokens:
            x, title = normal(tokens, k, dtype=dtype), f"{tokens} tokens, {k} to {n}"
            inputs = [tensor(x, dtype), *held]
            yield Case(title, called(plain, inputs), [span(x, weight)])
            with_bias = [*inputs, tensor(bias, dtype)]
            yield Case(f"bias, {title}", called(biased, with_bias), [span(x, weight, bias)])
            if tokens in sizes.tokens[1:3]:
                dy = normal(tokens, n, seed=9, dtype=dtype)
                run = differentiated(plain, inputs, tensor(dy, dtype), (0,))
                yield Case(f"gradients, {title}", run, [span(dy, weight.T)])
            if tokens == 17:
                x = x.copy()
                x[3, 20] = np.nan
                run = called(plain, [tensor(x, dtype), *held])
                yield Case(f"nan in one number of x, {title}", run, [span(x, weight)])


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Returns normal values representable in the dtype, as float32."""
    drawn = np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)
    return to_float32(from_float32(drawn, named_dtype(dtype)))


def tensor(array: np.ndarray, dtype: str) -> Tensor:
    """Returns a Tensor of the named dtype."""
    return Tensor(np.asarray(array), getattr(ms, dtype))


def values(result: Tensor) -> np.ndarray:
    """Returns a Tensor's values as float32, since NumPy has no bfloat16."""
    return ms.ops.cast(result, ms.float32).asnumpy()


def shape_title(tokens: int, k: int, n: int, rank: int) -> str:
    """Returns the shapes of a case in words."""
    return f"{tokens} tokens, {k} to {n}, rank {rank}"


CASES: Dict[str, Callable[[str, Sizes, bool], Iterator[Case]]] = {
    function.__name__: function
    for function in (lora_delta, lora_linear, nf4_linear, multi_lora_delta, multi_lora_slot_write)
}
