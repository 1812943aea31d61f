"""The cases of scripts/verify_npu_operators.py: each operator on odd shapes and odd numbers, and what must come out."""

import dataclasses
import importlib.util
import os
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from mindlora.numerics.dtypes import from_float32, named_dtype, to_float32
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

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCALE = 0.75
# An infinity or NaN in y0 may spoil as many neighbours in its row (ops/lora_delta/README.md).
NEIGHBOURS = 15


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The shapes that are tried: every number of tokens and rank with every pair of widths (K, N)."""

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
        title (str): Shapes, and what is odd about the numbers.
        run (Callable): Returns what the operator computes, a list of arrays.
        wanted (list of ndarray): What it must compute.
        terms (float): How many products of numbers of size 1 are summed; 0 if not a bit may differ.
        gradient (bool): Whether these are gradients, which are compared with the largest of each.
        may_spoil (ndarray or None): Where, in the first result, a number need not be finite.
    """

    title: str
    run: Callable[[], List[np.ndarray]]
    wanted: List[np.ndarray]
    terms: float
    gradient: bool = False
    may_spoil: Any = None


def reference(op: str) -> Any:
    """Returns the module ops/<op>/reference.py."""
    spec = importlib.util.spec_from_file_location(f"{op}_reference", os.path.join(ROOT, "ops", op, "reference.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        given = arrays(tokens, k, n, rank)
        inputs, title = [*(tensor(array, dtype) for array in given), scale], shape_title(tokens, k, n, rank)
        terms = 1 + rank * k**0.5
        yield Case(title, called(cell, inputs), [oracle.lora_delta(*given, SCALE)], terms)
        if tokens in sizes.tokens[1:3] and k <= 1000:
            dy = normal(tokens, n, seed=9, dtype=dtype)
            wanted = list(oracle.lora_delta_grad(dy, *given[1:], SCALE)[:4])
            run = differentiated(cell, inputs, tensor(dy, dtype), range(4))
            yield Case(f"gradients, {title}", run, wanted, terms, gradient=True)
    tokens, (k, n), rank = 17, sizes.widths[0], 5
    for place, name in ((0, "y0"), (1, "x")):
        for number in (np.nan, np.inf):
            given = arrays(tokens, k, n, rank)
            given[place][3, 20] = number
            spoiled = np.zeros((tokens, n), bool)
            spoiled[3, 20 - NEIGHBOURS : 20 + NEIGHBOURS + 1] = True
            if place == 1:
                spoiled[3] = True
            inputs = [*(tensor(array, dtype) for array in given), scale]
            yield Case(
                f"{number} in one number of {name}, {shape_title(tokens, k, n, rank)}",
                called(cell, inputs),
                [quietly(oracle.lora_delta, *given, SCALE)],
                1 + rank * k**0.5,
                may_spoil=spoiled,
            )


def lora_linear(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """x W^T + scale x A^T B^T, with and without bias, its gradients, and NaN in one number of x."""
    oracle, plain, biased = reference("lora_linear"), LoraLinear(), LoraLinearWithBias()
    scale = Tensor(SCALE, ms.float32)

    def arrays(tokens, k, n, rank):
        shapes = ((tokens, k), (n, k), (rank, k), (n, rank), (n,))
        return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]

    for tokens, k, n, rank in sizes.all():
        *given, bias = arrays(tokens, k, n, rank)
        inputs, title = [*(tensor(array, dtype) for array in given), scale], shape_title(tokens, k, n, rank)
        terms, with_bias = 1 + k + rank * k**0.5, [*inputs, tensor(bias, dtype)]
        yield Case(title, called(plain, inputs), [oracle.lora_linear(*given, SCALE)], terms)
        yield Case(f"bias, {title}", called(biased, with_bias), [oracle.lora_linear(*given, SCALE, bias)], terms)
        if tokens in sizes.tokens[1:3] and k <= 1000:
            dy = normal(tokens, n, seed=9, dtype=dtype)
            run = differentiated(biased, with_bias, tensor(dy, dtype), (0, 2, 3, 5))
            wanted = list(oracle.lora_linear_grad(dy, *given, SCALE))
            yield Case(f"gradients, {title}", run, wanted, terms, gradient=True)
    tokens, (k, n), rank = 17, sizes.widths[0], 5
    *given, bias = arrays(tokens, k, n, rank)
    given[0][3, 20] = np.nan
    inputs = [*(tensor(array, dtype) for array in given), scale]
    wanted = [oracle.lora_linear(*given, SCALE)]
    yield Case(f"nan in one number of x, {shape_title(tokens, k, n, rank)}", called(plain, inputs), wanted, 1 + k)


def multi_lora_delta(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """Rows of adapters of every rank, of an empty slot and of none; NaN in the pool where no adapter is."""
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
                wanted = [beyond_is_nan(oracle.multi_lora_delta, y0, x, pool, ranks, scales, indices)]
                inputs = [tensor(y0, dtype), tensor(x, dtype), *held, Tensor(indices)]
                # Rows without an adapter must come back as they are.
                terms = 0 if kind in ("none", "empty") else 1 + 64 * k**0.5
                yield Case(f"{tokens} tokens, {k} to {n}, adapters: {kind}", called(cell, inputs), wanted, terms)


def users(tokens: int, slots: int, empty: int, kernel: bool) -> Dict[str, np.ndarray]:
    """Returns which slot each token uses, in several ways; a kernel alone takes one beyond the pool."""
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
    """Returns what multi_lora_delta must compute; a row that asks for a slot beyond the pool is NaN."""
    beyond = indices >= len(ranks)
    wanted = oracle(y0, x, pool, ranks, scales, np.where(beyond, -1, indices))
    wanted[beyond] = np.nan
    return wanted


def multi_lora_slot_write(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """Adapters of every rank into the first and the last slot; not a bit beside them may change."""
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
                yield Case(f"rank {rank}, {k} + {n}, slot {slot} of {slots}", run, wanted, 0)


def written(cell: nn.Cell, before: List[np.ndarray], slot: int, packed: Tensor, dtype: str) -> Callable:
    """Returns a function that writes into new Parameters and returns them, and what the operator returned."""

    def run():
        pool, ranks, scales = map(Parameter, (tensor(before[0], dtype), Tensor(before[1]), Tensor(before[2])))
        out = cell(pool, ranks, scales, Tensor([slot], ms.int32), packed, Tensor(SCALE, ms.float32))
        # Beyond its rank an adapter's rows have no meaning: plain operators clear them.
        after = values(pool)
        if slot < len(after):
            after[slot, packed.shape[0] :] = before[0][slot, packed.shape[0] :]
        return [after, ranks.asnumpy(), scales.asnumpy(), out.asnumpy()]

    return run


def nf4_linear(dtype: str, sizes: Sizes, kernel: bool) -> Iterator[Case]:
    """x W^T with a W of 4 bits, with and without bias, its gradients, and NaN in one number of x."""
    oracle, plain, biased = reference("nf4_linear"), Nf4Linear(), Nf4LinearWithBias()
    for k, n in sizes.widths:
        array = quantize(normal(n, k, seed=1) * np.linspace(0.5, 1.5, n * k).reshape(n, k).astype(np.float32))
        parts = [array.codes, array.absmax, array.scales, array.offsets]
        bias, held = normal(n, seed=4, dtype=dtype), list(map(Tensor, parts))
        weight = oracle.dequantize(*parts, k)
        for tokens in sizes.tokens:
            x, title = normal(tokens, k, dtype=dtype), f"{tokens} tokens, {k} to {n}"
            inputs, terms = [tensor(x, dtype), *held], k + 1
            y = x.astype(np.float64) @ weight.T
            yield Case(title, called(plain, inputs), [y], terms)
            with_bias = [*inputs, tensor(bias, dtype)]
            yield Case(f"bias, {title}", called(biased, with_bias), [y + bias], terms)
            if tokens in sizes.tokens[1:3]:
                dy = normal(tokens, n, seed=9, dtype=dtype)
                run = differentiated(plain, inputs, tensor(dy, dtype), (0,))
                yield Case(f"gradients, {title}", run, [dy.astype(np.float64) @ weight], terms, gradient=True)
            if tokens == 17:
                x = x.copy()
                x[3, 20] = np.nan
                run = called(plain, [tensor(x, dtype), *held])
                yield Case(f"nan in one number of x, {title}", run, [x.astype(np.float64) @ weight.T], terms)


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """Returns normal values that the dtype can hold, as float32."""
    drawn = np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)
    return to_float32(from_float32(drawn, named_dtype(dtype)))


def tensor(array: np.ndarray, dtype: str) -> Tensor:
    """Returns a Tensor of a dtype by name."""
    return Tensor(np.asarray(array), getattr(ms, dtype))


def values(result: Tensor) -> np.ndarray:
    """Returns a Tensor as float32; NumPy has no bfloat16."""
    return ms.ops.cast(result, ms.float32).asnumpy()


def shape_title(tokens: int, k: int, n: int, rank: int) -> str:
    """Returns the shapes of a case in words."""
    return f"{tokens} tokens, {k} to {n}, rank {rank}"


def quietly(function: Callable, *arguments: Any) -> np.ndarray:
    """Calls a reference on numbers that are not finite, of which NumPy warns."""
    with np.errstate(invalid="ignore"):
        return function(*arguments)


CASES: Dict[str, Callable[[str, Sizes, bool], Iterator[Case]]] = {
    function.__name__: function
    for function in (lora_delta, lora_linear, nf4_linear, multi_lora_delta, multi_lora_slot_write)
}
