"""combine_adapters: arguments and adapters that it refuses."""

import numpy as np
import pytest

from mindlora.core.errors import (
    AdapterError,
    ConfigError,
    LoraError,
    NotFiniteError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
)
from mindlora.files.adapters.combine import combine_adapters
from tests.support.combinable_adapters import W1, WEIGHTS, WK, WQ, make, three_adapters


@pytest.fixture
def three():
    return three_adapters()


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("tise", {}, "method is 'tise', which is not known. Did you mean 'ties'? Known: cat, dare_linear, "),
        ("ties", {}, "method ties needs density: the share of elements to keep, above 0 and up to 1."),
        ("dare_ties_svd", {}, "method dare_ties_svd needs density"),
        ("ties", {"density": 0.0}, "density is 0.0: it must be above 0 and at most 1."),
        ("ties", {"density": 1.5}, "density is 1.5: it must be above 0 and at most 1."),
        ("dare_linear", {"density": float("nan")}, "density is nan: it must be above 0"),
        ("linear", {"density": 0.5}, "density is 0.5, but method linear prunes nothing: leave density out."),
        ("svd", {"density": 0.5}, "density is 0.5, but method svd prunes nothing: leave density out."),
        (
            "cat",
            {"svd_rank": 4},
            "svd_rank is 4, but method cat takes its rank from the adapters: leave svd_rank out, or use svd.",
        ),
        ("svd", {"svd_rank": 0}, "svd_rank is 0: it must be a whole number of at least 1."),
        (
            "ties",
            {"density": 0.5, "majority_sign": "totl"},
            "majority_sign is 'totl', which is not known. Did you mean 'total'? Known: frequency, total.",
        ),
    ],
)
def test_wrong_arguments(three, method, options, message):
    with pytest.raises(ConfigError) as error:
        combine_adapters(three, WEIGHTS, method, **options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "adapters, weights, message",
    [
        (0, [], "combine_adapters has no adapter to combine: name at least one, with its weight."),
        (3, [1.0], "3 adapters have 1 weights: give each adapter one weight."),
        (3, [1.0, 1.0, float("nan")], "A weight is nan: it must be a finite number."),
    ],
)
def test_wrong_counts_and_weights(three, adapters, weights, message):
    with pytest.raises(ConfigError) as error:
        combine_adapters(three[:adapters], weights, "linear")
    assert str(error.value) == message


@pytest.mark.parametrize("method", ["linear", "magnitude_prune", "ties", "dare_linear", "dare_ties"])
def test_ranks_must_agree_where_tensors_are_added(method):
    adapters = [make(0, {WQ: 3, WK: 2}), make(1, {WQ: 3, WK: 4})]
    with pytest.raises(RankMismatchError) as error:
        combine_adapters(adapters, [1.0, 1.0], method, **({} if method == "linear" else {"density": 0.5}))
    assert str(error.value) == (
        f"method {method} needs adapters of equal rank; at {WK} the ranks are 2, 4. Methods cat and svd take any ranks."
    )
    # The ranks of one adapter may differ among its paths.
    adapters[1] = make(1, {WQ: 3, WK: 2})
    result = combine_adapters(adapters, [1.0, 1.0], method, **({} if method == "linear" else {"density": 0.5}))
    assert (result.rank(WQ), result.rank(WK), result.scale(WK)) == (3, 2, 1)


def test_adapters_that_do_not_belong_together(three):
    three[1].tensors[WQ, "B"] = np.ones((13, 3), np.float32)
    with pytest.raises(ShapeMismatchError) as error:
        combine_adapters(three, WEIGHTS, "cat")
    assert str(error.value) == (
        f"Adapter 2 was trained on a different base from adapter 1: the weight of {WQ} [out, in] "
        "is [13, 10] in one and [12, 10] in the other. Combine adapters of one base."
    )
    with pytest.raises(AdapterError) as error:
        combine_adapters([make(0, {WQ: 3}), make(1, {W1: 3})], [1.0, 1.0], "cat")
    assert str(error.value) == (
        f"Adapter 1 has no path in common with any other adapter, so nothing would be combined. It adapts {WQ}. "
        "Combine adapters of the same cells."
    )


def test_adapters_that_cannot_be_combined(three):
    three[2].saved_modules = {"lm_head.weight": np.ones((4, 4), np.float32)}
    with pytest.raises(AdapterError) as error:
        combine_adapters(three, WEIGHTS, "svd")
    assert str(error.value) == (
        "Adapter 3 holds saved modules (modules_to_save), which cannot be combined: lm_head.weight. Merge this adapter "
        "into the base first, or leave it out."
    )
    three[2].saved_modules = {}
    three[1].tensors[WQ, "A"][0, 0] = np.nan
    with pytest.raises(NotFiniteError, match="Adapter 2 holds tensors with NaN"):
        combine_adapters(three, WEIGHTS, "svd")
    three[1].tensors[WQ, "A"][0, 0] = 0
    three[0].alphas = {}
    with pytest.raises(ScaleMismatchError, match="does not state lora_alpha") as error:
        combine_adapters(three, WEIGHTS, "cat")
    assert isinstance(error.value, LoraError)
