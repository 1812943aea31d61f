"""Numbers half way between two of a 16-bit dtype become the even one, wherever a kernel rounds in the simulator."""

import numpy as np
import pytest

from tests.support.ascend_arrays import empty, store, widen
from tests.support.ascendc_model import kernels

DTYPES = ("float16", "bfloat16")
# The step from 1 to the next number.
STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
SCALE = np.ones(1, np.float32)


def ties(dtype):
    """Numbers half way between two, and the even ones of these."""
    step = STEP[dtype]
    halves = 1 + step * np.array([0.5, 1.5, 2.5, 3.5])
    even = 1 + step * np.array([0, 2, 2, 4])
    return np.concatenate([halves, -halves]), np.concatenate([even, -even])


def stored(dtype, *arrays):
    """Arrays as they are stored; each of their numbers must be one of the dtype."""
    for array in arrays:
        assert np.array_equal(widen(store(array, dtype), dtype), array)
    return [store(array, dtype) for array in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
def test_y_of_lora_delta_on_the_vector_cores(dtype):
    halves, even = ties(dtype)
    whole = np.floor(halves / STEP[dtype]) * STEP[dtype]
    arrays = stored(dtype, whole[None], np.ones((1, 1)), np.ones((1, 1)), (halves - whole)[:, None])
    y = empty(dtype, 1, len(halves))
    inputs = list(zip(("y0", "x", "a", "b", "scale"), (*arrays, SCALE)))
    kernels.run("lora_delta", dtype, inputs, [("y", y, "out")], (1, 1, len(halves), 1), 0, 4)
    assert np.array_equal(widen(y, dtype)[0], even)


@pytest.mark.parametrize("dtype", DTYPES)
def test_y_of_lora_linear_on_the_vector_cores(dtype):
    halves, even = ties(dtype)
    whole = np.floor(halves / STEP[dtype]) * STEP[dtype]
    w = np.stack([whole, halves - whole], axis=1)
    arrays = stored(dtype, np.ones((1, 2)), w, np.zeros((1, 2)), np.zeros((len(halves), 1)))
    y = empty(dtype, 1, len(halves))
    inputs = list(zip(("x", "w", "a", "b", "scale", "bias"), (*arrays, SCALE, None)))
    kernels.run("lora_linear", dtype, inputs, [("y", y, "out")], (1, 2, len(halves), 1, 0), 0, 4)
    assert np.array_equal(widen(y, dtype)[0], even)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, cube_cores, key", [(1, 0, 1), (130, 1, 2)])
def test_y_of_multi_lora_delta_on_either_kind_of_cores(dtype, tokens, cube_cores, key):
    halves, even = ties(dtype)
    whole = np.floor(halves / STEP[dtype]) * STEP[dtype]
    pool = np.concatenate([[1], halves - whole])[None, None]
    y0, x, pool = stored(dtype, np.tile(whole, (tokens, 1)), np.ones((tokens, 1)), pool)
    y = empty(dtype, tokens, len(halves))
    given = (y0, x, pool, np.int32([1]), SCALE, np.zeros(tokens, np.int32))
    inputs = list(zip(("y0", "x", "pool", "ranks", "scales", "indices"), given))
    sizes = (tokens, 1, 1, 1, len(halves))
    assert kernels.plan("multi_lora_delta", dtype, sizes, cube_cores, 2)[0].tiling_key == key
    kernels.run("multi_lora_delta", dtype, inputs, [("y", y, "out")], sizes, cube_cores, 2)
    assert np.array_equal(widen(y, dtype), np.tile(even, (tokens, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rank_r_tensor_that_the_cube_cores_need(dtype):
    """A has a rank for each number, of which B hands it on."""
    halves, even = ties(dtype)
    whole, ranks = np.floor(halves / STEP[dtype]) * STEP[dtype], len(halves)
    a = np.stack([whole, halves - whole], axis=1)
    arrays = stored(dtype, np.zeros((64, ranks)), np.ones((64, 2)), a, np.eye(ranks))
    y = empty(dtype, 64, ranks)
    inputs = list(zip(("y0", "x", "a", "b", "scale"), (*arrays, SCALE)))
    sizes = (64, 2, ranks, ranks)
    assert kernels.plan("lora_delta", dtype, sizes, 1, 2)[0].tiling_key == 2
    kernels.run("lora_delta", dtype, inputs, [("y", y, "out")], sizes, 1, 2)
    assert np.array_equal(widen(y, dtype), np.tile(even, (64, 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_w_of_nf4_dequantize(dtype):
    """The largest number of a block is its offset, here half way between two of the dtype."""
    halves, even = ties(dtype)
    codes = np.full((1, 32 * 256), 0xFF, np.uint8)
    w = empty(dtype, 1, 64 * 256)
    for half, nearest in zip(halves, even):
        given = (store(np.ones(3), dtype), codes, np.zeros((1, 256), np.uint8), np.zeros(1, np.float32))
        inputs = list(zip(("like", "codes", "absmax", "scales"), given))
        inputs.append(("offsets", np.full(1, half, np.float32)))
        kernels.run("nf4_dequantize", dtype, inputs, [("w", w, "out")], (1, 64 * 256), 0, 4)
        assert np.all(widen(w, dtype) == nearest)
