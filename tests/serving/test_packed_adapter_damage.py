"""prepare refuses what load_lora refuses, in the same words, and packs what load_lora loads into the same numbers."""

import re
import warnings

import numpy as np
import pytest

from mindlora import LoRADense, load_lora, save_lora
from mindlora.core.errors import BaseMismatchError, LoraError
from mindlora.network.adapter_matching import cell_shapes
from mindlora.network.base_fingerprint import fingerprint_of, fingerprints_of
from mindlora.serving.packed_adapter import ServedLayout, prepare
from tests.support.damaged_adapters import CASES
from tests.support.networks import TinyModel
from tests.support.plain_networks import plain
from tests.support.refusals import part, refused
from tests.support.saved_adapters import network


def linear_cells(model):
    """Returns path -> cell of the cells that would get a pool."""
    return {path: cell for path, cell in model.cells_and_names() if hasattr(cell, "in_channels")}


def layout_of(model):
    cells = linear_cells(model)
    return ServedLayout(cell_shapes(model, cells), 16, fingerprint=fingerprints_of(cells))


@pytest.fixture(scope="module")
def bare():
    return plain(TinyModel)


def outcome(call, *arguments):
    """Returns the class and the message of the error that a call ends with, or None."""
    try:
        call(*arguments)
    except LoraError as error:
        # Where several tensors are wrong, the library may name any.
        return type(error), re.sub("`.*`", "", str(error))
    return None


def test_damaged_adapters_are_refused_in_the_words_of_load_lora(tmp_path):
    target = plain(lambda: TinyModel(1))
    layout, seen, different = layout_of(target), set(), {}
    for number, name in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        path = str(CASES[name][0](tmp_path / str(number)))
        found, expected = outcome(prepare, path, layout), outcome(load_lora, target, path)
        if found != expected:
            different[name] = found, expected
        if not expected:
            target = plain(lambda: TinyModel(1))
        seen.add(found and found[0].__name__)
    assert not different
    assert {"TruncatedAdapterError", "ShapeMismatchError", "NotFiniteError", "UnexpectedTensorsError"} < seen


def test_a_saved_adapter_is_packed_as_load_lora_loads_it(saved, bare):
    loaded, packed = plain(TinyModel), prepare(saved, layout_of(bare))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(loaded, saved)
    cells = {path: cell for path, cell in loaded.cells_and_names() if isinstance(cell, LoRADense)}
    assert packed.blocks.keys() == cells.keys()
    for path, cell in cells.items():
        a, b = cell.pair()
        np.testing.assert_array_equal(packed.blocks[path].rows, np.concatenate([a, b.T], axis=1))
        assert packed.blocks[path].scale == cell.scale


def test_an_adapter_of_another_base_is_refused(tmp_path, bare):
    path = str(tmp_path / "adapter")
    save_lora(network(base=6), path)
    refused(
        BaseMismatchError,
        part("was trained on another base: the adapted weights have other values"),
        prepare,
        path,
        layout_of(bare),
    )


@pytest.mark.parametrize("count", [1, 3, 14])
def test_fingerprints_of_some_cells_are_those_of_fingerprint_of(bare, count):
    cells = linear_cells(bare)
    chosen = dict(list(cells.items())[:count])
    assert len(chosen) == count > 0
    assert fingerprints_of(cells)(chosen) == fingerprint_of(chosen)
