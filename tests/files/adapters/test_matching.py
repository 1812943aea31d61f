"""Adapters of a bare model: layers.0..., as PEFT's has them on an AutoModel, are model.layers.0... here."""

import json
import os

import numpy as np
import pytest

from mindlora.core.formats import ckpt_file
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.combine import combine_adapters
from mindlora.files.adapters.convert import convert_adapter
from tests.support.adapter_samples import CONFIG, WEIGHTS, K, Q, folder, make, peft_tensors

EMBEDDING = "model.tok_embeddings"


def bare_folder(path, adapter, **fields):
    """Writes PEFT's folder of an adapter as PEFT does for an AutoModel."""
    tensors = {name.replace(".model.model.", ".model."): array for name, array in peft_tensors(adapter).items()}
    return folder(path, tensors, **{"task_type": "FEATURE_EXTRACTION", **fields})


def keys_of(path):
    with TensorFile(os.path.join(path, WEIGHTS)) as file:
        return set(file.tensors)


def test_an_adapter_of_a_bare_model_is_read_under_the_names_of_the_model_with_a_head(tmp_path):
    adapter = make(ranks={Q: 2, K: 1}, alphas={Q: 3.0, K: 5.0})
    read = adapter_files.read(
        bare_folder(
            tmp_path / "bare", adapter, rank_pattern={"^layers.0.self_attn.k_proj": 1}, alpha_pattern={"k_proj": 5}
        )
    )
    assert read.paths == [Q, K] and read.ranks == (1, 2) and read.alphas == adapter.alphas
    for key, array in adapter.tensors.items():
        np.testing.assert_array_equal(read.tensors[key], array)


def test_modules_and_rows_of_tokens_that_were_saved_with_it_get_these_names_too(tmp_path):
    rows = np.ones((2, 6), np.float32)
    tensors = {f"base_model.model.{name}": rows for name in ("norm.weight", "embed_tokens.weight")}
    tensors |= {name.replace(".model.model.", ".model."): array for name, array in peft_tensors(make()).items()}
    path = folder(tmp_path / "saved", tensors, modules_to_save=["norm"])
    assert set(adapter_files.read(path).saved_modules) == {"model.norm_out.weight", f"{EMBEDDING}.embedding_weight"}
    key = "base_model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    path = folder(tmp_path / "rows", {key: rows, **tensors}, modules_to_save=["norm"], trainable_token_indices=[1, 4])
    read = adapter_files.read(path, extras=adapter_files.Extras(token_rows=True))
    assert list(read.token_rows) == [EMBEDDING]


@pytest.mark.parametrize("expert", ["mlp.experts.3.up_proj", "mlp.experts.gate_up_proj"])
def test_an_adapter_of_experts_alone_is_known_too(tmp_path, expert):
    config = {"target_modules": ["up_proj"]}
    tensors = {"A": np.ones((2, 6), np.float32), "B": np.ones((4, 2), np.float32)}
    path = f"layers.1.{expert}"
    if expert.endswith("gate_up_proj"):
        config = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}
        path = "layers.1.mlp.experts"
    stored = {f"base_model.model.{path}.lora_{half}.weight": array for half, array in tensors.items()}
    (read,) = adapter_files.read(folder(tmp_path / "experts", stored, **config)).paths
    assert read.startswith("model.layers.1.mlp.experts.")


def test_what_is_written_for_mindformers_has_a_network_s_names(tmp_path):
    source = bare_folder(tmp_path / "bare", make())
    convert_adapter(source, str(tmp_path / "a.ckpt"), "ckpt")
    arrays, _ = ckpt_file.read(str(tmp_path / "a.ckpt"), lambda name: True)
    assert set(arrays) == {f"{path}.mindpet_delta_lora_{half}" for path in (Q, K) for half in "ab"}


def test_peft_s_form_keeps_the_names_of_the_model_that_it_was_trained_on(tmp_path):
    fields = {"target_modules": r"layers\.\d\.self_attn\.[qk]_proj", "rank_pattern": {"layers.0.self_attn.k_proj": 1}}
    source = bare_folder(tmp_path / "bare", make(ranks={Q: 2, K: 1}), **fields)
    convert_adapter(source, str(tmp_path / "again"), "peft")
    assert keys_of(source) == keys_of(tmp_path / "again")
    config = json.loads((tmp_path / "again" / CONFIG).read_text())
    assert {field: config[field] for field in fields} == fields and config["task_type"] == "FEATURE_EXTRACTION"


def test_several_keep_their_names_if_all_are_of_a_bare_model(tmp_path):
    bare = bare_folder(tmp_path / "bare", make())
    whole = folder(tmp_path / "whole", peft_tensors(make()))
    for pair, written in (((bare, bare), bare), ((bare, whole), whole), ((whole, whole), whole)):
        combined = combine_adapters(list(map(adapter_files.read, pair)), [1.0, 1.0], "cat")
        output = tmp_path / f"combined-{len(list(tmp_path.iterdir()))}"
        adapter_files.write(combined, str(output))
        assert keys_of(output) == keys_of(written)
        assert set(adapter_files.read(str(output)).paths) == {Q, K}


@pytest.mark.parametrize("path", ["layers.0.dense", "blocks.0.attention.wq", "text_model.encoder.layers.0.mlp.fc1"])
def test_cells_of_no_known_model_keep_their_names(tmp_path, path):
    adapter = make(ranks={path: 2})
    assert adapter_files.read(folder(tmp_path / "own", peft_tensors(adapter), target_modules=[path])).paths == [path]
