"""load_lora if adapter and network differ: tensors, ranks, scales, the base; and what strict=False accepts."""

import logging
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from mindlora import LoraConfig, LoraError, apply_lora, load_lora, save_lora
from mindlora.core.errors import (
    BaseMismatchError,
    MissingTensorsError,
    NotFiniteError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
    UnexpectedTensorsError,
)
from mindlora.network.save_load import check_base
from tests.support.networks import adapters, randomize
from tests.support.saved_adapters import FORMS, configured, edited, key, load_refused, network

# Tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form, name", FORMS)
def test_missing_and_unexpected_tensors(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(["wq", "wk"]), path, format=form)
    k, v = (
        f"model.layers.{{0..1}}.attention.{leaf} A, model.layers.{{0..1}}.attention.{leaf} B" for leaf in ("wk", "wv")
    )
    unexpected = f"PATH holds 4 LoRA tensors that the network has no place for: {k}. "
    missing = f"PATH lacks 4 LoRA tensors of the network: {v}. "
    advice = "Check target_modules."
    load_refused(network(["wq", "wk", "wv"]), path, MissingTensorsError, missing + advice)
    load_refused(network(["wq"]), path, UnexpectedTensorsError, unexpected + advice)
    load_refused(network(["wq", "wv"]), path, MissingTensorsError, unexpected + missing + advice)
    load_refused(
        network(["wv"]), path, MissingTensorsError, "PATH holds 8 LoRA tensors that the network has no place for"
    )


def test_a_single_missing_tensor_is_named(saved):
    edited(saved, lambda tensors: tensors.pop(key(1, "k_proj", "B")))
    load_refused(
        network(),
        saved,
        MissingTensorsError,
        "PATH lacks half of 1 pairs: it holds model.layers.1.attention.wk A without its other half.",
    )


def test_a_wrong_shape_is_named_with_both_shapes(saved):
    def edit(tensors):
        tensors[key(0, "q_proj", "A")] = np.ones((2, 7), np.float32)
        tensors[key(1, "k_proj", "B")] = np.ones((5, 2), np.float32)

    edited(saved, edit)
    load_refused(
        network(),
        saved,
        ShapeMismatchError,
        "PATH: 2 tensors have another shape: model.layers.0.attention.wq A is [2, 7], the network's is [2, 6]; "
        "model.layers.1.attention.wk B is [5, 2], the network's is [4, 2].",
    )


@pytest.mark.parametrize(
    "shape, problem",
    [
        ((3, 6), "A [r, in] and B [out, r] have no rank r in common"),
        ((6, 2), "A is transposed: it must be [r, in]"),
        ((12,), "A and B must be matrices"),
        ((1, 2, 6), "A and B must be matrices"),
        ((), "A and B must be matrices"),
        ((2, 0), "A or B is empty"),
    ],
)
def test_one_tensor_of_another_rank_or_dimension_is_a_wrong_shape(saved, shape, problem):
    edited(saved, lambda tensors: tensors.update({key(0, "q_proj", "A"): np.ones(shape, np.float32)}))
    load_refused(
        network(),
        saved,
        ShapeMismatchError,
        f"PATH: {problem}, at model.layers.0.attention.wq (A {list(shape)}, B [6, 2]).",
    )


@pytest.mark.parametrize("form, name", FORMS)
def test_a_wrong_rank_says_which_to_set(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(["wq"], lora_rank=4), path, format=form)
    load_refused(
        network(["wq"]),
        path,
        RankMismatchError,
        "PATH has rank 4, but the network was built with lora_rank 2: set lora_rank to 4.",
    )


def test_a_rank_that_is_declared_but_not_there_is_refused(saved):
    configured(saved, r=4)
    load_refused(
        network(),
        saved,
        RankMismatchError,
        "PATH: the configuration declares rank 4 and the tensors have 2, at model.layers.{0..1}.attention.wk (A "
        "[2, 6], B [4, 2]), model.layers.{0..1}.attention.wq (A [2, 6], B [6, 2]).",
    )


@pytest.mark.parametrize("form, name", FORMS)
def test_a_wrong_alpha_says_which_to_set(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(lora_alpha=4.5), path, format=form)
    load_refused(
        network(),
        path,
        ScaleMismatchError,
        "PATH was trained with lora_alpha 4.5, but the network was built with 3: set lora_alpha to 4.5, or its effect "
        "is scaled wrongly.",
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nan_is_not_loaded(saved, value, dtype):
    def edit(tensors):
        tensors[key(1, "k_proj", "A")] = np.array([[1] * 5 + [value], [1] * 6], dtype)

    edited(saved, edit)
    load_refused(
        network(), saved, NotFiniteError, "PATH holds tensors with NaN or infinity: model.layers.1.attention.wk A."
    )


# strict=False ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form, name", FORMS)
def test_not_strict_loads_what_matches_and_warns_of_the_rest(tmp_path, form, name, caplog):
    path = str(tmp_path / name)
    save_lora(network(["wq", "wk"], seed=2), path, format=form)
    target = network(["wq", "wv"], seed=3)
    with caplog.at_level(logging.WARNING, "mindlora"):
        load_lora(target, path, strict=False, on_base_mismatch="ignore")
    q, v = network(["wq", "wk"], seed=2), network(["wq", "wv"], seed=3)
    for parameter_name, parameter in adapters(target).items():
        source = q if ".wq." in parameter_name else v
        np.testing.assert_array_equal(parameter.asnumpy(), adapters(source)[parameter_name].asnumpy())
    k, v = (
        f"model.layers.{{0..1}}.attention.{leaf} A, model.layers.{{0..1}}.attention.{leaf} B" for leaf in ("wk", "wv")
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} holds 4 LoRA tensors that the network has no place for: {k}. Check target_modules. Loading the rest, "
        "as strict is False.",
        f"{path} lacks 4 LoRA tensors of the network: {v}. Check target_modules. Loading the rest, as strict is False.",
    ]


def test_not_strict_needs_one_tensor_at_least(saved):
    load_refused(
        network(["wv"]),
        saved,
        MissingTensorsError,
        "PATH shares no LoRA tensor with the network. PATH holds 8 ",
        strict=False,
    )


def test_not_strict_still_checks_what_it_loads(saved):
    load_refused(network(["wq", "wv"], lora_rank=3), saved, RankMismatchError, "PATH has rank 2", strict=False)
    load_refused(network(["wq", "wv"], lora_alpha=4), saved, ScaleMismatchError, "lora_alpha 3", strict=False)
    edited(saved, lambda tensors: tensors.update({key(0, "q_proj", "A"): np.full((2, 6), np.nan, np.float32)}))
    load_refused(network(["wq", "wv"]), saved, NotFiniteError, "model.layers.0.attention.wq A.", strict=False)


# Another base ---------------------------------------------------------------------------------------------------

MISMATCH = (
    "PATH was trained on another base: the adapted weights have other values (another checkpoint, or another "
    "dtype). Load the base checkpoint it was trained on."
)


@pytest.mark.parametrize("form, name", FORMS)
def test_another_base_is_warned_of(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(seed=2), path, format=form)
    target = network(base=6)
    with pytest.warns(UserWarning) as caught:
        load_lora(target, path)
    assert [str(warning.message) for warning in caught] == [MISMATCH.replace("PATH", path)]
    assert caught[0].filename == __file__
    loaded = adapters(target)
    for parameter_name, parameter in adapters(network(seed=2)).items():
        np.testing.assert_array_equal(loaded[parameter_name].asnumpy(), parameter.asnumpy())


@pytest.mark.parametrize("form, name", FORMS)
def test_another_base_is_an_error_where_that_is_asked_for(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network(seed=2), path, format=form)
    load_refused(network(base=6), path, BaseMismatchError, MISMATCH, on_base_mismatch="error")
    load_lora(network(), path, on_base_mismatch="error")


def test_another_base_can_be_ignored(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(network(base=6), saved, on_base_mismatch="ignore")


def test_a_file_that_knows_no_base_is_loaded_in_silence(saved):
    edited(saved, lambda tensors: None, metadata={"format": "pt"})  # as PEFT itself writes it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(network(base=6), saved, on_base_mismatch="error")


def test_an_unknown_way_to_treat_it_is_refused(saved):
    with pytest.raises(LoraError) as error:
        load_lora(network(), saved, on_base_mismatch="raise")
    assert str(error.value) == "on_base_mismatch is 'raise': it must be 'warn', 'error' or 'ignore'."


def test_a_copy_of_the_base_in_another_dtype_is_the_base_unless_a_run_goes_on(tmp_path):
    def of_dtype(dtype):
        network = nn.SequentialCell(nn.Dense(6, 5, has_bias=False, dtype=dtype))
        randomize(network.get_parameters(), seed=3)
        apply_lora(network, LoraConfig(target_modules="all-linear"))
        return network

    path = str(tmp_path / "adapter")
    save_lora(of_dtype(ms.float32), path)
    copy = of_dtype(ms.float16)
    check_base(copy, path)
    check_base(of_dtype(ms.float32), path, exact=True)
    with pytest.raises(BaseMismatchError, match="was trained on another base"):
        check_base(copy, path, exact=True)
