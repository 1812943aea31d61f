"""merge_checkpoint compares the base with the adapter's fingerprint, as load_lora and the server do."""

import numpy as np
import pytest

from mindlora import cli
from mindlora.core.errors import BaseMismatchError, LoraError, MergeError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.fingerprint import ROW_ORDERS, fingerprint_from, sampled_elements, sampled_paths
from mindlora.files.adapters.joined_pairs import joined_weight
from mindlora.files.base.merge import merge_checkpoint
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.models import names
from mindlora.models.lora_config import LoraConfig
from tests.support.llama_checkpoints import CONFIG, KV_HEADS, llama, load, save_base
from tests.support.merged_checkpoints import DTYPES, assert_merged, pairs, save_adapter


def fingerprint_of(weights, **fields):
    """Returns the fingerprint of weights, path -> array."""
    samples = {path: sampled_elements(weights[path]) for path in sampled_paths(weights)}
    return {**fingerprint_from({path: array.shape for path, array in weights.items()}, samples), **fields}


def weights_of(source, found):
    """Returns the adapted weights of a base, by their paths under MindFormers' names."""
    return {names.to_mindformers(path): source[f"{path}.weight"] for path in found}


def adapter_with(tmp_path, found, fingerprint):
    adapter = adapter_files.read(save_adapter(tmp_path / "plain", found))
    adapter.fingerprint = fingerprint
    adapter_files.write(adapter, str(tmp_path / "adapter"))
    return str(tmp_path / "adapter")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_base_that_it_was_trained_on_in_any_dtype(tmp_path, dtype):
    found, trained_on = pairs(), llama(DTYPES["float32"])
    adapter = adapter_with(tmp_path, found, fingerprint_of(weights_of(trained_on, found)))
    source = llama(DTYPES[dtype])
    merge_checkpoint(save_base(tmp_path / "base", source), adapter, str(tmp_path / "out"))
    assert_merged(load(tmp_path / "out"), source, found)


def test_an_adapter_of_a_base_as_it_is_stored_says_that_values_were_not_compared(tmp_path):
    found, source = pairs(), llama()
    fingerprint = fingerprint_of(weights_of(source, found), quantization="int4")
    adapter = adapter_with(tmp_path, found, fingerprint)
    report = merge_checkpoint(save_base(tmp_path / "base", source), adapter, str(tmp_path / "out"))
    assert report.notes[0].startswith(
        "The adapter was trained on its base as it is stored, in int4, and this one is in fl"
    )
    assert_merged(load(tmp_path / "out"), source, found)


def test_another_base_of_the_same_shapes_is_refused_unless_a_flag_says_otherwise(tmp_path, capsys):
    found, source = pairs(), llama()
    adapter = adapter_with(tmp_path, found, fingerprint_of(weights_of(llama(DTYPES["float32"]), found)))
    for name in source:
        source[name] = np.roll(source[name], 1, 0)
    base, output = save_base(tmp_path / "base", source), str(tmp_path / "out")
    with pytest.raises(BaseMismatchError, match="adapter was trained on another base: the adapted weights have other"):
        merge_checkpoint(base, adapter, output)
    assert not (tmp_path / "out").exists()
    report = merge_checkpoint(base, adapter, output, on_base_mismatch="warn")
    assert "was trained on another base" in report.notes[0]
    assert_merged(load(output), source, found)
    words = ["base", "merge", "--base", base, "--adapter", adapter, "--output", output, "--overwrite"]
    assert cli.main([*words, "--on-base-mismatch", "ignore"]) == 0 and "another base" not in capsys.readouterr().out
    assert cli.main(words) == 1 and "was trained on another base" in capsys.readouterr().err
    with pytest.raises(LoraError, match="on_base_mismatch is 'never'"):
        merge_checkpoint(base, adapter, output, on_base_mismatch="never")


@pytest.mark.parametrize("layouts", ROW_ORDERS, ids="+".join)
@pytest.mark.parametrize("same", [True, False])
def test_an_adapter_that_was_trained_on_mcore_s_joined_cells(tmp_path, layouts, same):
    found, source = pairs(), llama(DTYPES["float32"])
    trained = {}
    for path, weight in weights_of(source, found).items():
        joined = names.joined_path(path)
        mcore = names.to_mcore(joined or path)
        parts = [weights_of(source, found)[part] for part in names.joined_parts(joined)] if joined else [weight]
        layout = layouts.get(mcore.rpartition(".")[2])
        trained[mcore] = joined_weight(mcore, parts, KV_HEADS, layout) if joined else weight
    if not same:
        trained = {path: -weight for path, weight in trained.items()}
    adapter = adapter_with(tmp_path, found, fingerprint_of(trained))
    base = save_base(tmp_path / "base", source, **CONFIG)
    if same:
        merge_checkpoint(base, adapter, str(tmp_path / "out"))
    else:
        with pytest.raises(BaseMismatchError):
            merge_checkpoint(base, adapter, str(tmp_path / "out"))


def test_loftq_s_adapter_is_for_its_quantized_base_alone(tmp_path):
    base, quantized = save_base(tmp_path / "base", llama(DTYPES["float32"])), str(tmp_path / "base-nf4.safetensors")
    config = LoraConfig(lora_rank=4, target_modules="all-linear", quantize_base="nf4", lora_init="loftq_iter_1")
    adapter = str(tmp_path / "loftq")
    quantize_checkpoint(base, quantized, adapter=adapter, config=config)
    with pytest.raises(BaseMismatchError, match="another base: LoftQ changed the base, and its adapter is for the"):
        merge_checkpoint(base, adapter, str(tmp_path / "out"))
    with pytest.raises(
        MergeError, match="is LoftQ's, for such a base alone, and has no merged form: train it and serve"
    ):
        merge_checkpoint(quantized, adapter, str(tmp_path / "out.safetensors"))


def test_an_adapter_that_was_trained_on_nf4_gets_a_note_of_the_measured_difference(tmp_path):
    found, source = pairs(), llama(DTYPES["float32"])
    weights = weights_of(source, found)
    fingerprint = fingerprint_of(weights, values="0" * 16, quantization="nf4")
    report = merge_checkpoint(
        save_base(tmp_path / "base", source), adapter_with(tmp_path, found, fingerprint), str(tmp_path / "out")
    )
    (note,) = report.notes
    # The rounding of normal weights to NF4 is a tenth of their size.
    errors = [dequantize(quantize(to_float32(weight))) - weight for weight in weights.values()]
    share = np.sqrt(sum((error**2).sum() for error in errors) / sum((each**2).sum() for each in weights.values()))
    measured = float(note.split("differ by ")[1].split("%")[0]) / 100
    assert abs(measured - share) < 0.3 * share and "with 8 of its 14 weights" in note
