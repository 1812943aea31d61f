"""Writes golden files for the programs ops/<operator>/ascendc/check.cpp: inputs, and what may come out.

    python ops/ascendc_check/golden.py FOLDER [OPERATOR ...] [--small]

Needs NumPy alone. What must come out is computed by ops/<operator>/reference.py in float64, from inputs as the dtype
holds them; bounds.py says how near to it a result must be. FOLDER/<operator> gets one file for each dtype and case;
README.md describes them.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import bounds
import numpy as np
from bounds import Span, held, store

OPS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DTYPES = ("float32", "float16", "bfloat16")
SCALE = 0.75
# tokens, K, N, rank: odd ones, both sides of 16 tokens, and a larger one for more cores.
SIZES = ((1, 37, 53, 5), (3, 130, 16, 8), (8, 1000, 267, 1), (17, 37, 53, 16), (33, 257, 129, 64))
LARGE = (8, 2048, 1024, 16)
# The slots of the pool: ranks of their adapters. The last but one is empty.
RANKS = np.int32([1, 5, 8, 0, 16])


@dataclasses.dataclass
class Tensor:
    """One line of a golden file.

    Attributes:
        name (str): As the operator's host side calls it.
        dtype (str): In which it is stored.
        before (ndarray or None): Its values before the call; None if the operator writes all of it.
        after (Span or None): Between which numbers its values must be after the call; None for an input.
    """

    name: str
    dtype: str
    before: Optional[np.ndarray] = None
    after: Optional[Span] = None

    def line(self) -> str:
        """Returns role, name, dtype and shape."""
        role = "in" if self.after is None else "out" if self.before is None else "inout"
        shape = ",".join(map(str, np.shape(self.before if self.after is None else self.after[0])))
        return f"{role} {self.name} {self.dtype} {shape}"


Case = Tuple[str, List[Tensor]]


def normal(seed: int, dtype: str, *shapes: Sequence[int]) -> List[np.ndarray]:
    """Returns normally distributed numbers that the dtype can hold."""
    generator = np.random.default_rng(seed)
    return [held(generator.standard_normal(shape), dtype) for shape in shapes]


def inputs(dtype: str, **values: np.ndarray) -> List[Tensor]:
    """Returns input tensors of one dtype."""
    return [Tensor(name, dtype, before=array) for name, array in values.items()]


def numbers(dtype: str, **values: Any) -> List[Tensor]:
    """Returns input tensors of one dimension."""
    return [Tensor(name, dtype, before=np.atleast_1d(array)) for name, array in values.items()]


def sizes_of(small: bool) -> Tuple[Tuple[int, int, int, int], ...]:
    """Returns (tokens, K, N, rank) of the cases; without the larger one a simulator ends within minutes."""
    return SIZES if small else (*SIZES, LARGE)


def lora_delta(oracle: Any, dtype: str, small: bool) -> Iterator[Case]:
    """y0 + scale x A^T B^T."""
    for tokens, k, n, rank in sizes_of(small):
        y0, x, a, b = normal(1, dtype, (tokens, n), (tokens, k), (rank, k), (n, rank))
        span = bounds.low_rank(oracle.lora_delta(y0, x, a, b, SCALE), np.abs(y0), x, a, b, SCALE, dtype)
        tensors = [*inputs(dtype, y0=y0, x=x, a=a, b=b), *numbers("float32", scale=SCALE)]
        tensors.append(Tensor("y", dtype, None, span))
        yield f"t{tokens}_k{k}_n{n}_r{rank}", tensors


def lora_linear(oracle: Any, dtype: str, small: bool) -> Iterator[Case]:
    """x W^T + scale x A^T B^T, with a bias and without: a matrix in its place means none."""
    for tokens, k, n, rank in sizes_of(small):
        x, w, a, b, bias = normal(2, dtype, (tokens, k), (n, k), (rank, k), (n, rank), (n,))
        products = np.abs(x) @ np.abs(w).T
        for title, given in (("", None), ("_bias", bias)):
            rest = products if given is None else products + np.abs(given)
            wanted = oracle.lora_linear(x, w, a, b, SCALE, given)
            y = Tensor("y", dtype, None, bounds.low_rank(wanted, rest, x, a, b, SCALE, dtype))
            place = inputs(dtype, bias=np.zeros((1, 1)) if given is None else given)
            tensors = [*inputs(dtype, x=x, w=w, a=a, b=b), *numbers("float32", scale=SCALE), *place, y]
            yield f"t{tokens}_k{k}_n{n}_r{rank}{title}", tensors


def multi_lora_delta(oracle: Any, dtype: str, small: bool) -> Iterator[Case]:
    """Rows of adapters of every rank, of an empty slot, of none, and of a slot beyond the pool, which are NaN."""
    slots, most = len(RANKS), int(RANKS.max())
    for tokens, k, n, _ in sizes_of(small):
        y0, x, pool = normal(3, dtype, (tokens, n), (tokens, k), (slots, most, k + n))
        for block, rank in zip(pool, RANKS):
            block[rank:] = np.nan
        scales = np.linspace(-1, 1.5, slots).astype(np.float32)
        kinds = {"mixed": (np.arange(tokens) * 3) % (slots + 1) - 1, "none": np.full(tokens, -1)}
        kinds["beyond"] = np.where(np.arange(tokens) == 0, slots, slots - 1)
        for kind, indices in kinds.items():
            wanted = oracle.multi_lora_delta(y0, x, pool, RANKS, scales, np.where(indices < slots, indices, -1))
            wanted[indices >= slots] = np.nan
            span = bounds.of_slots(wanted, y0, x, pool, RANKS, scales, indices, dtype)
            given = [*inputs(dtype, y0=y0, x=x, pool=pool), *numbers("int32", ranks=RANKS)]
            given += [*numbers("float32", scales=scales), *numbers("int32", indices=indices)]
            yield f"t{tokens}_k{k}_n{n}_{kind}", [*given, Tensor("y", dtype, None, span)]


def multi_lora_slot_write(oracle: Any, dtype: str, small: bool) -> Iterator[Case]:
    """Adapters into the first and the last slot; not a bit beside them may change. A slot beyond writes nothing."""
    slots, most = 4, 64
    for _, k, n, rank in sizes_of(small):
        pool, packed = normal(4, dtype, (slots, most, k + n), (rank, k + n))
        for slot in (0, slots - 1, slots):
            before = [pool, np.int32([1, 2, 0, 64]), np.float32([1, 2, 3, 4])]
            after = [array.copy() for array in before]
            if slot < slots:
                oracle.multi_lora_slot_write(*after, slot, packed, SCALE)
            kinds = (("pool", dtype), ("ranks", "int32"), ("scales", "float32"))
            tensors = [Tensor(name, of, old, bounds.exact(new)) for (name, of), old, new in zip(kinds, before, after)]
            tensors += [*numbers("int32", slot=slot), *inputs(dtype, packed=packed), *numbers("float32", scale=SCALE)]
            written = np.int32([slot if slot < slots else -1])
            tensors.append(Tensor("written", "int32", None, bounds.exact(written)))
            yield f"c{k + n}_r{rank}_slot{slot}", tensors


def nf4_dequantize(oracle: Any, dtype: str, small: bool) -> Iterator[Case]:
    """W from 4 bits, to the last bit: random codes, rows that end within a block, and whole blocks."""
    generator = np.random.default_rng(5)
    shapes = {(192, 7), *(sizes[1:3] for sizes in SIZES)} | (set() if small else {(2048, 128)})
    for k, n in sorted(shapes):
        blocks = -(-k // 64)
        groups = -(-n * blocks // 256)
        codes, absmax = (generator.integers(0, 256, (n, size), np.uint8) for size in (blocks * 32, blocks))
        scales, offsets = (generator.uniform(0.001, 0.01, groups).astype(np.float32) for _ in range(2))
        w = held(oracle.nf4_dequantize(codes, absmax, scales, offsets, k), dtype)
        # Of a vector, the dtype alone counts, and W has whole blocks.
        like = np.ones(3) if k % 64 == 0 else np.ones((1, k))
        given = [*inputs(dtype, like=like), *inputs("uint8", codes=codes, absmax=absmax)]
        given += inputs("float32", scales=scales, offsets=offsets)
        yield f"n{n}_k{k}", [*given, Tensor("w", dtype, None, bounds.exact(w))]


OPERATORS: Dict[str, Callable[[Any, str, bool], Iterator[Case]]] = {
    function.__name__: function
    for function in (lora_delta, lora_linear, multi_lora_delta, multi_lora_slot_write, nf4_dequantize)
}


def reference(op: str) -> Any:
    """Returns the module ops/<op>/reference.py."""
    spec = importlib.util.spec_from_file_location(f"{op}_reference", os.path.join(OPS, op, "reference.py"))
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"ops/{op}/reference.py cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_file(path: str, tensors: Sequence[Tensor]) -> None:
    """Writes one golden file: lines, an empty one, then for each tensor its bytes and, in float64, what is right."""
    with open(path, "wb") as file:
        file.write("\n".join(["golden file 2", *(tensor.line() for tensor in tensors), "", ""]).encode())
        for tensor in tensors:
            if tensor.before is not None:
                file.write(store(tensor.before, tensor.dtype).tobytes())
            if tensor.after is not None:
                for end in tensor.after:
                    file.write(np.ascontiguousarray(end, np.float64).tobytes())


def write(
    folder: str, operators: Sequence[str] = tuple(OPERATORS), dtypes: Sequence[str] = DTYPES, small: bool = False
) -> List[str]:
    """Writes the golden files of operators.

    Args:
        folder (str): Gets a folder for each operator.
        operators (sequence of str): Names in OPERATORS. Default: all.
        dtypes (sequence of str): Names in DTYPES. Default: all.
        small (bool): Without the larger case. Default: False.

    Returns:
        list of str, the paths.
    """
    paths = []
    for op in operators:
        os.makedirs(os.path.join(folder, op), exist_ok=True)
        for dtype in dtypes:
            for title, tensors in OPERATORS[op](reference(op), dtype, small):
                paths.append(os.path.join(folder, op, f"{dtype}_{title}.golden"))
                write_file(paths[-1], tensors)
    return paths


def main() -> int:
    """Reads the command line and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("operators", nargs="*", choices=[*OPERATORS, []], metavar="OPERATOR", help="default: all")
    parser.add_argument("--small", action="store_true", help="without the larger case")
    given = parser.parse_args()
    paths = write(given.folder, given.operators or tuple(OPERATORS), small=given.small)
    print(f"{len(paths)} files below {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
