"""Writes golden files for the programs ops/<operator>/ascendc/check.cpp: inputs, what must come out, and how near.

    python ops/ascendc_check/golden.py FOLDER [OPERATOR ...] [--small]

Needs NumPy alone. What must come out is computed by ops/<operator>/reference.py in float64, from inputs as the dtype
holds them. FOLDER/<operator> gets one file for each dtype and case; README.md describes them.
"""

import argparse
import dataclasses
import importlib.util
import os
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

OPS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DTYPES = ("float32", "float16", "bfloat16")
# The largest error of rounding a number to the dtype once, relative to it.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
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
        expected (ndarray or None): Its values after the call; None for an input.
        absolute (float): A number may be off by this, and by the rounding of the dtype if this is not 0.
    """

    name: str
    dtype: str
    before: Optional[np.ndarray] = None
    expected: Optional[np.ndarray] = None
    absolute: float = 0.0

    def line(self) -> str:
        """Returns role, name, dtype, shape and tolerances."""
        role = "in" if self.expected is None else "out" if self.before is None else "inout"
        shape = ",".join(map(str, np.shape(self.before if self.expected is None else self.expected)))
        relative = 1.01 * ROUNDING[self.dtype] if self.absolute else 0.0
        return f"{role} {self.name} {self.dtype} {shape}" + ("" if role == "in" else f" {relative} {self.absolute}")


Case = Tuple[str, List[Tensor]]


def store(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns an array as it is stored: bfloat16, which NumPy lacks, as the upper halves of float32."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values, dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def held(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the values that an array has once it is stored, as float64."""
    stored = store(values, dtype)
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def normal(seed: int, dtype: str, *shapes: Sequence[int]) -> List[np.ndarray]:
    """Returns normally distributed numbers that the dtype can hold."""
    generator = np.random.default_rng(seed)
    return [held(generator.standard_normal(shape), dtype) for shape in shapes]


def error_of_sums(terms: float, dtype: str) -> float:
    """Returns by how much a sum of so many products of numbers near 1 may be off: float32, and 16-bit low-rank rows."""
    return (4e-7 + (0 if dtype == "float32" else ROUNDING[dtype])) * max(1.0, terms)


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
        y = Tensor("y", dtype, None, oracle.lora_delta(y0, x, a, b, SCALE), error_of_sums(1 + rank * k**0.5, dtype))
        tensors = [*inputs(dtype, y0=y0, x=x, a=a, b=b), *numbers("float32", scale=SCALE), y]
        yield f"t{tokens}_k{k}_n{n}_r{rank}", tensors


def lora_linear(oracle: Any, dtype: str, small: bool) -> Iterator[Case]:
    """x W^T + scale x A^T B^T, with a bias and without: a matrix in its place means none."""
    for tokens, k, n, rank in sizes_of(small):
        x, w, a, b, bias = normal(2, dtype, (tokens, k), (n, k), (rank, k), (n, rank), (n,))
        for title, given in (("", None), ("_bias", bias)):
            wanted = oracle.lora_linear(x, w, a, b, SCALE, given)
            y = Tensor("y", dtype, None, wanted, error_of_sums(1 + k + rank * k**0.5, dtype))
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
            absolute = 0.0 if kind == "none" else error_of_sums(1 + most * k**0.5, dtype)
            given = [*inputs(dtype, y0=y0, x=x, pool=pool), *numbers("int32", ranks=RANKS)]
            given += [*numbers("float32", scales=scales), *numbers("int32", indices=indices)]
            yield f"t{tokens}_k{k}_n{n}_{kind}", [*given, Tensor("y", dtype, None, wanted, absolute)]


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
            tensors = [
                Tensor(name, of, *arrays)
                for name, of, *arrays in zip(("pool", "ranks", "scales"), (dtype, "int32", "float32"), before, after)
            ]
            tensors += [*numbers("int32", slot=slot), *inputs(dtype, packed=packed), *numbers("float32", scale=SCALE)]
            tensors.append(Tensor("written", "int32", None, np.int32([slot if slot < slots else -1])))
            yield f"c{k + n}_r{rank}_slot{slot}", tensors


def nf4_dequantize(oracle: Any, dtype: str, small: bool) -> Iterator[Case]:
    """W from 4 bits, to the last bit: random codes, rows that end within a block, and whole blocks."""
    generator = np.random.default_rng(5)
    for k, n in sorted({(192, 7), *(sizes[1:3] for sizes in sizes_of(small))}):
        blocks = -(-k // 64)
        groups = -(-n * blocks // 256)
        codes, absmax = (generator.integers(0, 256, (n, size), np.uint8) for size in (blocks * 32, blocks))
        scales, offsets = (generator.uniform(0.001, 0.01, groups).astype(np.float32) for _ in range(2))
        w = held(oracle.nf4_dequantize(codes, absmax, scales, offsets, k), dtype)
        # Of a vector, the dtype alone counts, and W has whole blocks.
        like = np.ones(3) if k % 64 == 0 else np.ones((1, k))
        given = [*inputs(dtype, like=like), *inputs("uint8", codes=codes, absmax=absmax)]
        yield f"n{n}_k{k}", [*given, *inputs("float32", scales=scales, offsets=offsets), Tensor("w", dtype, None, w)]


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
    """Writes one golden file: lines, an empty one, then for each tensor its bytes and, in float64, what is expected."""
    with open(path, "wb") as file:
        file.write("\n".join(["golden file 1", *(tensor.line() for tensor in tensors), "", ""]).encode())
        for tensor in tensors:
            if tensor.before is not None:
                file.write(store(tensor.before, tensor.dtype).tobytes())
            if tensor.expected is not None:
                file.write(np.ascontiguousarray(tensor.expected, np.float64).tobytes())


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
