"""merge_checkpoint: what cannot be merged, with nothing written."""

import os
import re

import numpy as np
import pytest

from mindlora.core.errors import (
    CheckpointError,
    MergeError,
    NotFiniteError,
    ShapeMismatchError,
    TruncatedAdapterError,
    UnexpectedTensorsError,
)
from mindlora.core.numerics import folding
from mindlora.files.base.merge import merge_checkpoint
from tests.support.llama_checkpoints import HIDDEN, VOCAB, llama, load, save_base
from tests.support.merged_checkpoints import DTYPES, Q, pairs, save_adapter
from tests.support.refusals import refused


def merge_refused(tmp_path, error, pattern, base, found, saved_modules=None, **keys):
    """Asserts that merging fails, and that only base and adapter are there afterwards."""
    adapter = save_adapter(tmp_path / "adapter", found, saved_modules)
    message = re.compile(f".*(?:{pattern})", re.DOTALL)
    refused(error, message, merge_checkpoint, base, adapter, str(tmp_path / "out"), **keys)
    assert sorted(os.listdir(tmp_path)) == ["adapter", "base"]


def test_a_path_that_the_base_lacks(tmp_path):
    lost = "model.layers.7.self_attn.q_proj"
    merge_refused(
        tmp_path,
        UnexpectedTensorsError,
        "model.layers.7.attention.wq.weight",
        save_base(tmp_path / "base", llama()),
        pairs(Q, lost),
    )


@pytest.mark.parametrize("shape", [(32, 31), (31, 32), (48, 32)])
def test_another_shape(tmp_path, shape):
    merge_refused(
        tmp_path,
        ShapeMismatchError,
        r"q_proj.weight is \[32, 32\] in the base.*It belongs to another model",
        save_base(tmp_path / "base", llama()),
        pairs(Q, shapes={Q: shape}),
    )


def test_a_saved_module_of_another_shape(tmp_path):
    merge_refused(
        tmp_path,
        ShapeMismatchError,
        "lm_head.weight has 65 rows and the base 64: tokens were added",
        save_base(tmp_path / "base", llama()),
        pairs(Q),
        {"lm_head.weight": np.ones((VOCAB + 1, HIDDEN), np.float32)},
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_adapter_that_is_not_finite(tmp_path, value):
    found = pairs(Q)
    found[Q][1][3, 2] = value
    merge_refused(tmp_path, NotFiniteError, "wq B", save_base(tmp_path / "base", llama()), found)


def test_quantized_weights(tmp_path):
    source = {**llama(), f"{Q}.weight": np.ones((32, 32), np.int8)}
    merge_refused(tmp_path, MergeError, "quantized", save_base(tmp_path / "base", source), pairs(Q))


def test_a_sum_that_is_too_large_for_the_dtype(tmp_path):
    found = pairs(Q)
    found[Q][1][5] *= 1e5
    merge_refused(
        tmp_path,
        MergeError,
        "q_proj.weight, row 5: .*too large",
        save_base(tmp_path / "base", llama(DTYPES["float16"])),
        found,
    )


def test_one_element_that_is_too_large_for_the_dtype(tmp_path):
    """A single infinity in a row makes the bound infinite as well."""
    found = pairs(Q)
    found[Q][0][:], found[Q][1][:] = 0, 0
    found[Q][0][0, 3], found[Q][1][5, 0] = 1, 1e6
    merge_refused(
        tmp_path,
        MergeError,
        "q_proj.weight, row 5: .*too large",
        save_base(tmp_path / "base", llama(DTYPES["float16"])),
        found,
    )


def test_a_saved_module_that_is_too_large_for_the_dtype(tmp_path):
    merge_refused(
        tmp_path,
        MergeError,
        "lm_head.weight of .*too large",
        save_base(tmp_path / "base", llama(DTYPES["float16"])),
        pairs(Q),
        {"lm_head.weight": np.full((VOCAB, HIDDEN), 1e5, np.float32)},
    )


def test_a_base_with_nan(tmp_path):
    source = llama(DTYPES["float32"])
    source[f"{Q}.weight"][9, 3] = np.nan
    merge_refused(tmp_path, MergeError, "row 9", save_base(tmp_path / "base", source), pairs(Q))


def test_a_truncated_shard(tmp_path):
    base = save_base(tmp_path / "base", llama(), shards=2)
    path = tmp_path / "base" / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    merge_refused(tmp_path, TruncatedAdapterError, "model-1", base, pairs(Q))


def test_outputs_that_would_destroy_something(tmp_path):
    base, adapter = save_base(tmp_path / "base", llama()), save_adapter(tmp_path / "adapter", pairs(Q))
    for output in (base, adapter, os.path.join(base, "merged")):
        with pytest.raises(CheckpointError, match="is inside the input"):
            merge_checkpoint(base, adapter, output, overwrite=True)
    merge_checkpoint(base, adapter, str(tmp_path / "out"))
    before = load(tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists"):
        merge_checkpoint(base, adapter, str(tmp_path / "out"))
    merge_checkpoint(str(tmp_path / "out"), adapter, str(tmp_path / "twice"))
    merge_checkpoint(str(tmp_path / "twice"), adapter, str(tmp_path / "out"), overwrite=True)
    assert load(tmp_path / "out")[f"{Q}.weight"].tobytes() != before[f"{Q}.weight"].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_rounding_does_not_explain_is_found(tmp_path, monkeypatch, dtype):
    """A rounding that loses the update of a single row."""
    exact = folding.rounded

    def lossy(array, kind):
        if len(array) > 5:
            array[5] = 0
        return exact(array, kind)

    monkeypatch.setattr(folding, "rounded", lossy)
    merge_refused(
        tmp_path,
        MergeError,
        "row 5: the result on a random probe",
        save_base(tmp_path / "base", llama(DTYPES[dtype])),
        pairs(Q),
    )
