"""Adapter: scales, updates, and the checks of its pairs."""

import numpy as np
import pytest

from mindlora.core.errors import (
    MissingTensorsError,
    NotFiniteError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
)
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from mindlora.files.adapters.adapter import Adapter, is_finite
from tests.support.adapter_samples import K, Q, make, scale_of


def shaped(a, b, path=Q):
    return Adapter({(path, "A"): np.ones(a, np.float32), (path, "B"): np.ones(b, np.float32)}, {path: 1.0})


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("rank, alpha", [(1, 1.0), (2, 3.0), (64, 0.5)])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", BFLOAT16])
def test_the_update_is_scale_b_a(rank, alpha, rslora, dtype):
    adapter = make({Q: rank}, {Q: alpha}, np.dtype(dtype), use_rslora=rslora)
    a, b = (to_float32(adapter.tensors[Q, half]).astype(np.float64) for half in "AB")
    assert adapter.scale(Q) == pytest.approx(scale_of(alpha, rank, rslora), rel=1e-15)
    delta = adapter.delta(Q)
    assert delta.dtype == np.float32
    np.testing.assert_allclose(delta, scale_of(alpha, rank, rslora) * b @ a, rtol=1e-5, atol=1e-6)


def test_paths_and_ranks():
    adapter = make({K: 3, Q: 1, "": 5})
    assert adapter.paths == [K, Q, ""] and [adapter.rank(path) for path in adapter.paths] == [3, 1, 5]
    assert adapter.ranks == (1, 3, 5) and make({K: 2, Q: 2}).ranks == (2,)


def test_without_alpha_there_is_no_scale_until_it_is_set():
    adapter = make(dialect="MindFormers' LoRA")
    adapter.alphas = {}
    with pytest.raises(ScaleMismatchError) as error:
        adapter.delta(Q)
    assert str(error.value) == (
        f"The adapter (MindFormers' LoRA) does not state lora_alpha, so the scale of {Q} is not "
        "known. Give the lora_alpha that it was trained with."
    )
    adapter.set_alpha(5)
    assert adapter.alphas == {Q: 5.0, K: 5.0} and adapter.scale(K) == 2.5
    with pytest.raises(ScaleMismatchError) as error:
        adapter.set_alpha(5)
    assert str(error.value) == "lora_alpha is 5, but the adapter has its own: 5. Leave it out."


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), True, "5", None])
def test_an_invalid_alpha_is_refused(alpha):
    adapter = make()
    adapter.alphas = {}
    with pytest.raises(ScaleMismatchError) as error:
        adapter.set_alpha(alpha)
    assert str(error.value) == f"lora_alpha is {alpha!r}; it must be a number above 0." and adapter.alphas == {}


# Pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b, declared, kind, problem",
    [
        ((6, 2), (2, 6), 2, ShapeMismatchError, "A and B are swapped"),
        ((6, 2), (2, 5), 2, ShapeMismatchError, "A and B are swapped"),
        ((6, 2), (5, 2), 2, ShapeMismatchError, "A is transposed: it must be [r, in]"),
        ((2, 6), (2, 5), 2, ShapeMismatchError, "B is transposed: it must be [out, r]"),
        ((3, 6), (5, 3), 2, RankMismatchError, "the configuration declares rank 2 and the tensors have 3"),
        ((3, 6), (5, 4), 2, ShapeMismatchError, "A [r, in] and B [out, r] have no rank r in common"),
        ((2, 6), (5, 4), 2, ShapeMismatchError, "A [r, in] and B [out, r] have no rank r in common"),
        ((2, 6), (5, 4), None, ShapeMismatchError, "A [r, in] and B [out, r] have no rank r in common"),
        ((2, 6), (2, 5), None, ShapeMismatchError, "B is transposed: it must be [out, r]"),
        ((6,), (5, 2), None, ShapeMismatchError, "A and B must be matrices"),
        ((2, 6), (5, 2, 1), None, ShapeMismatchError, "A and B must be matrices"),
        ((), (), 2, ShapeMismatchError, "A and B must be matrices"),
        ((0, 6), (5, 0), None, ShapeMismatchError, "A or B is empty"),
        ((2, 0), (5, 2), 2, ShapeMismatchError, "A or B is empty"),
    ],
)
def test_pairs_whose_shapes_do_not_agree(a, b, declared, kind, problem):
    with pytest.raises(kind) as error:
        shaped(a, b).check_pairs("file", {Q: declared} if declared else None)
    assert type(error.value) is kind
    assert str(error.value).startswith(f"file: {problem}, at {Q} (A {list(a)}, B {list(b)}). ")


@pytest.mark.parametrize(
    "a, b, declared",
    [((2, 6), (5, 2), 2), ((2, 6), (5, 2), None), ((6, 6), (6, 6), 6), ((1, 1), (1, 1), 1), ((7, 6), (5, 7), None)],
)
def test_pairs_whose_shapes_agree(a, b, declared):
    shaped(a, b).check_pairs("file", {Q: declared} if declared else None)


def test_halves_are_named_with_their_layers_put_together():
    adapter = make({f"model.layers.{layer}.attention.wq": 2 for layer in range(3)})
    for layer in (0, 1):
        del adapter.tensors[f"model.layers.{layer}.attention.wq", "B"]
    with pytest.raises(MissingTensorsError) as error:
        adapter.check_pairs("file")
    assert str(error.value) == (
        "file lacks half of 2 pairs: it holds model.layers.{0..1}.attention.wq A without its other half. Copy or save "
        "the adapter again."
    )


# Numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", BFLOAT16])
@pytest.mark.parametrize("where", ["A", "B", "whole"])
def test_nan_and_infinity_are_found_wherever_they_are(value, dtype, where):
    adapter = make(dtype=np.dtype(dtype), saved_modules={"lm_head.weight": np.ones((2, 2), np.float32)})
    adapter.check_finite("file")
    bad = from_float32(np.array([[0, value], [1, 2]], np.float32), np.dtype(dtype))
    if where == "whole":
        adapter.saved_modules["lm_head.weight"] = bad
    else:
        adapter.tensors[K, where] = bad
    with pytest.raises(NotFiniteError) as error:
        adapter.check_finite("file")
    name = "lm_head.weight" if where == "whole" else f"{K} {where}"
    assert str(error.value) == (
        f"file holds tensors with NaN or infinity: {name}. Use a checkpoint from before training diverged."
    )


def test_large_numbers_whose_sum_overflows_are_finite():
    assert is_finite(np.full((4, 4), 3e38, np.float32)) and is_finite(np.full(9, 65504, np.float16))
    assert not is_finite(np.array([np.inf, -np.inf], np.float32)) and is_finite(np.zeros((0, 3), np.float32))
    assert is_finite(np.array([1, 2], np.int32))


@pytest.mark.parametrize(
    "a, b, kind, message",
    [
        ((4, 6, 3, 3), (8, 4, 1, 1), None, ""),
        ((4, 6, 3, 3), (8, 2, 1, 1), None, ""),
        ((4, 6, 3, 3), (8, 3, 1, 1), ShapeMismatchError, "B of a convolution must be [out, r / groups, 1, 1]"),
        ((4, 6, 3, 3), (8, 4, 3, 1), ShapeMismatchError, "B of a convolution must be [out, r / groups, 1, 1]"),
        ((4, 6, 3, 3), (8, 4), ShapeMismatchError, "A and B must be matrices"),
        ((5, 6, 3, 3), (8, 5, 1, 1), RankMismatchError, "the configuration declares rank 4 and the tensors have 5"),
    ],
)
def test_pairs_of_convolutions(a, b, kind, message):
    adapter = Adapter({("patch", "A"): np.ones(a, np.float32), ("patch", "B"): np.ones(b, np.float32)}, {"patch": 1.0})
    if kind is None:
        adapter.check_pairs("It", {"patch": 4})
        return
    with pytest.raises(kind) as error:
        adapter.check_pairs("It", {"patch": 4})
    assert str(error.value).startswith(f"It: {message}, at patch (A {list(a)}, B {list(b)}). ")
