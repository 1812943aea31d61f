"""What ops/ascendc_check/bounds.py lets pass and what it does not, on all golden files, without a kernel.

A result in NumPy's float32 takes the kernel's place: summed in three orders it must be right, and with each fault it
must be wrong in one file of each dtype at least.
"""

import dataclasses
import functools
import os
from typing import List

import numpy as np
import pytest

from tests.conftest import ROOT

OPERATORS = ("lora_delta", "lora_linear", "multi_lora_delta")
DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module", autouse=True)
def _scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.path.join(ROOT, "ops", "ascendc_check"))
        yield


@dataclasses.dataclass
class Product:
    """y = the sum of rest + ((x A^T) * scale) B^T of the rows that share an adapter."""

    rows: np.ndarray
    rest: List[np.ndarray]
    x: np.ndarray
    a: np.ndarray
    b: np.ndarray
    scale: float
    dtype: str
    kept: str

    def low(self, times=np.matmul):
        """(x A^T) * scale as it is kept."""
        return held(np.float32(self.scale) * times(np.float32(self.x), np.float32(self.a).T), self.kept)

    def y(self, times=np.matmul):
        """y before it is rounded."""
        return sum(self.rest) + times(np.float32(self.low(times)), np.float32(self.b).T)

    def but(self, **changed):
        """y with other inputs, rounded."""
        return held(dataclasses.replace(self, **changed).y(), self.dtype)


def held(values, dtype):
    import bounds

    return bounds.held(values, dtype).astype(np.float32)


@functools.lru_cache(maxsize=None)
def files(op, dtype):
    """The golden files of an operator: (title, tensors by name)."""
    import golden

    cases = golden.OPERATORS[op](golden.reference(op), dtype, False)
    return [(title, {tensor.name: tensor for tensor in tensors}) for title, tensors in cases]


def products(op, tensors, dtype, kept, times=np.matmul):
    """The products of a golden file; those rows that have none are not among them."""
    given = {name: tensor.before for name, tensor in tensors.items()}
    x = np.float32(given["x"])
    if op == "multi_lora_delta":
        k = x.shape[1]
        for slot in np.unique(given["indices"]):
            if 0 <= slot < len(given["ranks"]) and given["ranks"][slot]:
                rows, block = given["indices"] == slot, given["pool"][slot, : given["ranks"][slot]]
                rest = [np.float32(given["y0"][rows])]
                yield Product(rows, rest, x[rows], block[:, :k], block[:, k:].T, given["scales"][slot], dtype, kept)
        return
    if op == "lora_delta":
        rest = [np.float32(given["y0"])]
    else:
        rest = [times(x, np.float32(given["w"]).T)] + [np.float32(given["bias"])] * (given["bias"].ndim == 1)
    yield Product(np.full(len(x), True), rest, x, given["a"], given["b"], given["scale"][0], dtype, kept)


def one_by_one(x, w, step=1):
    """x w in float32, term by term."""
    total = np.zeros((len(x), w.shape[1]), np.float32)
    for k in range(x.shape[1])[::step]:
        total += np.outer(x[:, k], w[k])
    return total


def backwards(x, w):
    return one_by_one(x, w, -1)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("times", (np.matmul, one_by_one, backwards))
def test_float32_in_any_order_is_right_with_the_rank_r_tensor_rounded_or_not(op, dtype, times):
    import bounds

    for title, tensors in files(op, dtype):
        lowest, highest = tensors["y"].after
        for kept in {"float32", dtype}:
            for product in products(op, tensors, dtype, kept, times):
                y, span = held(product.y(times), dtype), (lowest[product.rows], highest[product.rows])
                assert not bounds.wrong(y, span).any(), (title, kept)
                # And far from being wrong: on an NPU no order of a sum may reach the end.
                if dtype == "float32":
                    middle, half = (span[0] + span[1]) / 2, (span[1] - span[0]) / 2
                    assert np.all(np.abs(y - middle) <= half / 8), title


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_documented_arithmetic_in_float64_is_right(op, dtype):
    """Without any error of float32: the rank-r tensor is rounded once or not at all, y once."""
    import bounds

    for title, tensors in files(op, dtype):
        lowest, highest = tensors["y"].after
        for kept in ("float64", dtype):
            for product in products(op, tensors, dtype, kept, lambda x, w: np.float64(x) @ np.float64(w)):
                low = bounds.held(np.float64(product.x) @ product.a.T * product.scale, kept)
                y = bounds.held(sum(map(np.float64, product.rest)) + low @ product.b.T, dtype)
                span = lowest[product.rows], highest[product.rows]
                assert not bounds.wrong(y, span).any(), (title, kept)


def last_is_zero(array, axis):
    changed = array.copy()
    changed[(slice(None),) * axis + (-1,)] = 0
    return changed


def neighbours(y, axis):
    """The last row or column has the numbers of the one before it."""
    changed = y.copy()
    changed[(slice(None),) * axis + (slice(-1, None),)] = np.take(y, [-2 if y.shape[axis] > 1 else -1], axis)
    return changed


def cut_off(p):
    """Towards zero."""
    y = p.y()
    near = held(y, p.dtype)
    return np.where(np.abs(near) > np.abs(y), held(near - np.sign(near) * np.abs(near - y) * 2, p.dtype), near)


def in_parts(p):
    """x A^T in four parts, of which each is rounded."""
    low = sum(held(x @ np.float32(a).T, p.dtype) for x, a in zip(np.array_split(p.x, 4, 1), np.array_split(p.a, 4, 1)))
    return held(sum(p.rest) + held(low * np.float32(p.scale), p.kept) @ np.float32(p.b).T, p.dtype)


def rounded_before_the_scale(p):
    low = held(p.x @ np.float32(p.a).T, p.dtype) * np.float32(p.scale)
    return held(sum(p.rest) + held(low, p.kept) @ np.float32(p.b).T, p.dtype)


def rounded_twice(p):
    return held(sum(p.rest) + held(dataclasses.replace(p, rest=[np.float32(0)]).y(), p.dtype), p.dtype)


FAULTS = {
    "the last number of K is missing": lambda p: p.but(x=last_is_zero(p.x, 1)),
    "the last rank is missing": lambda p: p.but(b=last_is_zero(p.b, 1)),
    "a row of A is its neighbour's": lambda p: p.but(a=neighbours(p.a, 0)),
    "A is read one row off": lambda p: p.but(a=np.roll(p.a, 1, 0)),
    "B is read one row off": lambda p: p.but(b=np.roll(p.b, 1, 0)),
    "the scale is not applied": lambda p: p.but(scale=1),
    "the scale is applied twice": lambda p: p.but(scale=p.scale**2),
    "the product is subtracted": lambda p: p.but(scale=-p.scale),
    "the product is missing": lambda p: p.but(scale=0),
    "a term of the rest is missing": lambda p: p.but(rest=p.rest[:-1] or [np.float32(0)]),
    "a term of the rest is added twice": lambda p: p.but(rest=[*p.rest, p.rest[-1]]),
    "the last column is its neighbour's": lambda p: held(neighbours(p.y(), 1), p.dtype),
    "the last row is its neighbour's": lambda p: held(neighbours(p.y(), 0), p.dtype),
    "the last column is zero": lambda p: held(last_is_zero(p.y(), 1), p.dtype),
}
# In a narrower dtype than that of the sums.
ROUNDING_FAULTS = {
    "the product is rounded before it is added": rounded_twice,
    "x A^T is rounded before the scale": rounded_before_the_scale,
    "parts of x A^T are rounded": in_parts,
    "y is cut off": cut_off,
}


def found_in(op, dtype, fault):
    """The share of an operator's files in which a fault is seen, of those with products."""
    import bounds

    seen = []
    for _, tensors in files(op, dtype):
        lowest, highest = tensors["y"].after
        wrong = [
            bounds.wrong(fault(product), (lowest[product.rows], highest[product.rows])).any()
            for product in products(op, tensors, dtype, "float32")
        ]
        seen += [any(wrong)] if wrong else []
    return np.mean(seen)


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_fault_is_found(op, dtype):
    faults = FAULTS if dtype == "float32" else {**FAULTS, **ROUNDING_FAULTS}
    missed = {name for name, fault in faults.items() if not found_in(op, dtype, fault)}
    assert not missed


@pytest.mark.parametrize("narrow", ("float16", "bfloat16"))
def test_float32_that_is_multiplied_in_fewer_bits_is_found(narrow):
    for op in OPERATORS:
        share = found_in(op, "float32", lambda p: p.but(x=held(p.x, narrow)))
        assert share == 1, op


def test_a_row_without_an_adapter_must_not_change_by_a_bit():
    import bounds

    y0 = np.float32([[1, -2.5, 3e-5]])
    none = (np.zeros((1, 2)), np.ones((1, 4, 5)), np.int32([4]), np.float32([1]), np.int32([-1]))
    span = bounds.of_slots(y0.astype(np.float64), y0, *none, "float32")
    assert not bounds.wrong(y0, span).any() and bounds.wrong(np.nextafter(y0, 9), span).all()
