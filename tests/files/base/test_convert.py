"""convert_base: names as MindFormers converts them, bytes unchanged, qkv_concat and tied embeddings."""

import os

import numpy as np
import pytest

from mindlora.core.errors import CheckpointError, TruncatedAdapterError
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.numerics.dtypes import BFLOAT16
from mindlora.files.base.convert import convert_base
from mindlora.files.base.reader import INDEX
from tests.support.llama_checkpoints import (
    CONFIG,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    VOCAB,
    assert_same,
    llama,
    load,
    save_base,
)

# Names and bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biases", [False, True])
def test_names_and_bytes_are_those_of_mindformers(tmp_path, mindformers, biases):
    source = llama(biases=biases)
    report = convert_base(save_base(tmp_path / "hf", source, shards=3), str(tmp_path / "mf"), "hf", "mindformers")
    convert = mindformers.LlamaForCausalLM.convert_name
    assert_same(load(tmp_path / "mf"), {convert(name): array for name, array in source.items()})
    assert (report.from_, report.to, report.tensors, report.skipped, report.notes) == (
        "hf",
        "mindformers",
        len(source),
        (),
        (),
    )
    assert report.bytes == sum(array.nbytes for array in source.values()) and len(report.files) == 3
    assert sorted(os.listdir(tmp_path / "mf")) == sorted([*report.files, INDEX, "param_name_map.json"])


@pytest.mark.parametrize("form", ["folder", "model.safetensors", "model.ckpt"])
def test_there_and_back(tmp_path, form):
    source = llama(biases=True)
    save_base(tmp_path / "hf", source, shards=2)
    convert_base(str(tmp_path / "hf"), str(tmp_path / form), None, "mindformers")
    report = convert_base(str(tmp_path / form), str(tmp_path / "back"), None, "hf")
    assert_same(load(tmp_path / "back"), source)
    assert str(tmp_path / "back") in str(report)
    assert "from MindFormers' names to Hugging Face's" in str(report)
    with TensorFile(tmp_path / "back" / report.files[0]) as file:
        assert file.metadata == {"format": "pt"}


def test_the_converted_checkpoint_is_what_a_llama_holds(tmp_path, make_llama):
    import mindspore as ms

    network = make_llama()
    wanted = {parameter.name for parameter in network.get_parameters()}
    convert_base(
        save_base(tmp_path / "hf", llama(dtype=np.dtype("<f4"))), str(tmp_path / "mf.safetensors"), "hf", "mindformers"
    )
    loaded = ms.load_checkpoint(str(tmp_path / "mf.safetensors"), format="safetensors")
    assert set(loaded) == wanted
    assert ms.load_param_into_net(network, loaded) == ([], [])


def test_tables_that_models_compute_are_left_out(tmp_path):
    source = llama()
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for layer in range(2)}
    report = convert_base(save_base(tmp_path / "hf", {**source, **extra}), str(tmp_path / "mf"), None, "mindformers")
    assert set(report.skipped) == set(extra) and report.tensors == len(source)
    assert "model.layers.{0..1}.self_attn.rotary_emb.inv_freq" in str(report)


# qkv_concat -----------------------------------------------------------------------------------------------------


def theirs(source, biases):
    """Returns what MindFormers' own functions make of a Hugging Face checkpoint in float32."""
    from mindformers import LlamaForCausalLM
    from mindformers.utils.convert_utils import ffn_concat_hf2mg, qkv_concat_hf2mg

    result = {LlamaForCausalLM.convert_name(name): array for name, array in source.items()}
    for layer in range(2):
        start = f"model.layers.{layer}."
        for leaf in ("weight", "bias") if biases else ("weight",):
            parts = [result.pop(f"{start}attention.{part}.{leaf}") for part in ("wq", "wk", "wv")]
            result[f"{start}attention.w_qkv.{leaf}"] = qkv_concat_hf2mg(np.concatenate(parts), HEADS, KV_HEADS, HIDDEN)
        parts = [result.pop(f"{start}feed_forward.{part}.weight") for part in ("w1", "w3")]
        result[f"{start}feed_forward.w_gate_hidden.weight"] = ffn_concat_hf2mg(np.concatenate(parts), FFN)
    return result


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("shards", [1, 4])
def test_joined_as_mindformers_joins_and_split_again(tmp_path, mindformers, monkeypatch, biases, shards):
    # Blocks of single groups, so that block borders are tested.
    monkeypatch.setattr("mindlora.files.base.writer._BLOCK", 1)
    source = llama(biases=biases, dtype=np.dtype("<f4"))
    save_base(tmp_path / "hf", source, shards=shards, **CONFIG)
    convert_base(str(tmp_path / "hf"), str(tmp_path / "mf"), "hf", "mindformers", concat=True)
    assert_same(load(tmp_path / "mf"), theirs(source, biases))
    convert_base(str(tmp_path / "mf"), str(tmp_path / "back"), "mindformers", "hf", heads=HEADS, kv_heads=KV_HEADS)
    assert_same(load(tmp_path / "back"), source)


def test_a_joined_checkpoint_is_what_a_llama_with_qkv_concat_holds(tmp_path, make_llama):
    save_base(tmp_path / "hf", llama(dtype=np.dtype("<f4")), **CONFIG)
    convert_base(str(tmp_path / "hf"), str(tmp_path / "mf"), None, "mindformers", concat=True)
    network = make_llama(qkv_concat=True)
    shapes = {parameter.name: parameter.shape for parameter in network.get_parameters()}
    assert {name: array.shape for name, array in load(tmp_path / "mf").items()} == shapes


@pytest.mark.parametrize(
    "keys, said",
    [
        ({}, "the number of heads is not known. .*--config"),
        ({"kv_heads": 2}, "the number of heads is not known"),
        ({"heads": 4, "kv_heads": 3}, "cannot be those"),
        ({"heads": 5, "kv_heads": 5}, "cannot be those of 5 heads"),
        ({"heads": 4, "kv_heads": -2}, "the number of heads is not known"),
    ],
)
def test_heads_that_are_missing_or_wrong(tmp_path, keys, said):
    save_base(tmp_path / "hf", llama(), **CONFIG)
    convert_base(str(tmp_path / "hf"), str(tmp_path / "mf"), None, "mindformers", concat=True)
    with pytest.raises(CheckpointError, match=said):
        convert_base(str(tmp_path / "mf"), str(tmp_path / "back"), None, "hf", **keys)
    assert sorted(os.listdir(tmp_path)) == ["hf", "mf"]


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"),
            "holds .*q_proj.weight and nothing for .*wk",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.up_proj.weight": np.zeros((FFN - 1, HIDDEN), BFLOAT16)}
            ),
            "48 and 47 rows .*cannot be joined into .*w_gate_hidden",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.v_proj.weight": np.zeros((8, HIDDEN), BFLOAT16)}),
            "with 2 key-value heads",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.self_attn.v_proj.weight": np.zeros((16, HIDDEN), np.float32)}
            ),
            "differ in dtype or width",
        ),
    ],
)
def test_parts_that_cannot_be_joined(tmp_path, change, said):
    source = llama()
    change(source)
    save_base(tmp_path / "hf", source, **CONFIG)
    with pytest.raises(CheckpointError, match=said):
        convert_base(str(tmp_path / "hf"), str(tmp_path / "mf"), None, "mindformers", concat=True)
    assert os.listdir(tmp_path) == ["hf"]


# Tied embeddings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}])
def test_tied_embeddings_get_a_head_and_lose_it_again(tmp_path, shards, config):
    source = llama(tied=True)
    save_base(tmp_path / "hf", source, shards=shards, **config)
    report = convert_base(str(tmp_path / "hf"), str(tmp_path / "mf"), None, "mindformers")
    result = load(tmp_path / "mf")
    assert result["lm_head.weight"].tobytes() == source["model.embed_tokens.weight"].tobytes()
    assert "written as a copy" in str(report) and report.tensors == len(source) + 1
    assert "left out" in str(convert_base(str(tmp_path / "mf"), str(tmp_path / "back"), None, "hf", tied=True))
    assert_same(load(tmp_path / "back"), source)
    convert_base(str(tmp_path / "mf"), str(tmp_path / "both"), None, "hf")
    assert load(tmp_path / "both").keys() == {*source, "lm_head.weight"}
    report = convert_base(str(tmp_path / "hf"), str(tmp_path / "without"), None, "mindformers", tied=True)
    assert "lm_head.weight" not in load(tmp_path / "without") and "tie_word_embeddings" in str(report)
    assert "tie_word_embeddings" in str(convert_base(str(tmp_path / "without"), str(tmp_path / "hf2"), None, "hf"))


@pytest.mark.parametrize("tie, tied", [(True, True), (True, False), (False, False)])
def test_tied_checkpoints_load_completely(tmp_path, make_llama, tie, tied):
    import mindspore as ms

    network = make_llama(tie_word_embeddings=tie)
    save_base(tmp_path / "hf", llama(tied=True, dtype=np.dtype("<f4")))
    convert_base(str(tmp_path / "hf"), str(tmp_path / "mf.ckpt"), None, "mindformers", tied=tied)
    not_loaded, _ = ms.load_param_into_net(network, ms.load_checkpoint(str(tmp_path / "mf.ckpt")))
    assert not_loaded == []
    np.testing.assert_array_equal(
        network.lm_head.weight.asnumpy(), network.model.tok_embeddings.embedding_weight.asnumpy()
    )


def test_a_head_that_is_missing_or_is_not_the_embedding(tmp_path):
    save_base(tmp_path / "lost", llama(tied=True), tie_word_embeddings=False)
    save_base(tmp_path / "own", llama())
    with pytest.raises(CheckpointError, match="lacks lm_head.weight, and its config.json"):
        convert_base(str(tmp_path / "lost"), str(tmp_path / "out"), None, "mindformers")
    with pytest.raises(CheckpointError, match="is not model.embed_tokens.weight, so tied would lose it"):
        convert_base(str(tmp_path / "own"), str(tmp_path / "out"), None, "mindformers", tied=True)
    source = {
        **llama(),
        "model.embed_tokens.weight": np.zeros((VOCAB, HIDDEN), BFLOAT16),
        "lm_head.weight": np.zeros((VOCAB, HIDDEN), np.float16),
    }
    with pytest.raises(CheckpointError, match="is not model.embed_tokens.weight"):
        convert_base(save_base(tmp_path / "same bytes", source), str(tmp_path / "out"), None, "mindformers", tied=True)
    assert sorted(os.listdir(tmp_path)) == ["lost", "own", "same bytes"]


# Wrong input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "from_, to, concat, said",
    [
        ("mindformers", "hf", False, "has Hugging Face's names, not MindFormers'"),
        (None, "hf", False, "already: use it as it is"),
        (None, "peft", False, "one of 'hf', 'mindformers', 'mcore'"),
        ("peft", "hf", False, "one of 'hf', 'mindformers', 'mcore'"),
    ],
)
def test_wrong_worlds(tmp_path, from_, to, concat, said):
    save_base(tmp_path / "hf", llama())
    with pytest.raises(CheckpointError, match=said):
        convert_base(str(tmp_path / "hf"), str(tmp_path / "out"), from_, to, concat=concat)
    assert os.listdir(tmp_path) == ["hf"]


def test_joined_tensors_are_not_hugging_faces(tmp_path):
    convert_base(save_base(tmp_path / "hf", llama()), str(tmp_path / "mf"), None, "mindformers")
    with pytest.raises(CheckpointError, match="Joined tensors"):
        convert_base(str(tmp_path / "mf"), str(tmp_path / "out"), None, "hf", concat=True)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.scale",
        "model.layers.0.mlp.experts.0.w1.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
    ],
)
def test_unknown_names(tmp_path, name):
    save_base(tmp_path / "hf", {**llama(), name: np.ones(3, np.float32)})
    with pytest.raises(CheckpointError) as error:
        convert_base(str(tmp_path / "hf"), str(tmp_path / "out"), None, "mindformers")
    assert name in str(error.value) and os.listdir(tmp_path) == ["hf"]


def test_a_truncated_shard_and_an_output_that_exists(tmp_path):
    save_base(tmp_path / "hf", llama(), shards=2)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        convert_base(str(tmp_path / "hf"), str(tmp_path / "out"), None, "mindformers")
    convert_base(str(tmp_path / "hf"), str(tmp_path / "out"), None, "mindformers", overwrite=True)
    path = tmp_path / "hf" / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TruncatedAdapterError, match="model-1"):
        convert_base(str(tmp_path / "hf"), str(tmp_path / "new"), None, "mindformers")
    assert sorted(os.listdir(tmp_path)) == ["hf", "out"] and len(load(tmp_path / "out")) == len(llama())
