"""The two names of a cell and of a parameter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindlora.models import names

PAIRS = [
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("feed_forward.w1", "mlp.gate_proj"),
    ("feed_forward.w2", "mlp.down_proj"),
    ("feed_forward.w3", "mlp.up_proj"),
]

PREFIXES = st.lists(st.sampled_from(["model", "layers", "0", "31", "encoder_block", "x"]), max_size=5).map(".".join)


@pytest.mark.parametrize("mindformers, hugging_face", PAIRS)
@pytest.mark.parametrize("prefix", ["", "model.layers.0.", "wrapper.model.layers.31."])
def test_each_cell_of_a_llama_has_two_names(mindformers, hugging_face, prefix):
    assert names.to_hugging_face(prefix + mindformers) == prefix + hugging_face
    assert names.to_mindformers(prefix + hugging_face) == prefix + mindformers
    assert names.aliases(prefix + mindformers) == (prefix + mindformers, prefix + hugging_face)


@pytest.mark.parametrize(
    "path",
    [
        "lm_head",
        "fc",
        "",
        "wq",
        "q_proj",
        "model.layers.0.attention.w_qkv",
        "model.layers.0.cross_attention.wq",
        "attention.wq.inner",
        "my_mlp.up_proj",
    ],
)
def test_other_paths_stay_as_they_are(path):
    assert names.to_hugging_face(path) == path
    assert names.to_mindformers(path) == path
    assert names.aliases(path) == (path,)


@given(PREFIXES, st.sampled_from(PAIRS))
def test_names_go_there_and_back(prefix, pair):
    mindformers, hugging_face = (f"{prefix}.{leaf}" if prefix else leaf for leaf in pair)
    assert names.to_mindformers(names.to_hugging_face(mindformers)) == mindformers
    assert names.to_hugging_face(names.to_mindformers(hugging_face)) == hugging_face


@given(
    st.lists(
        st.sampled_from(
            ["model", "3", "attention", "self_attn", "mlp", "feed_forward", "wq", "w1", "q_proj", "up_proj", ""]
        ),
        max_size=6,
    ).map(".".join)
)
def test_translating_twice_changes_nothing_more(path):
    assert names.to_hugging_face(names.to_hugging_face(path)) == names.to_hugging_face(path)
    assert names.to_mindformers(names.to_mindformers(path)) == names.to_mindformers(path)
    # Both names of a path mean the same cell.
    assert names.to_mindformers(names.to_hugging_face(path)) == names.to_mindformers(path)


@pytest.mark.parametrize(
    "path, parts",
    [
        (
            "model.layers.0.attention.w_qkv",
            ["model.layers.0.attention.wq", "model.layers.0.attention.wk", "model.layers.0.attention.wv"],
        ),
        ("feed_forward.w_gate_hidden", ["feed_forward.w1", "feed_forward.w3"]),
        ("w_qkv", ["wq", "wk", "wv"]),
        ("attention.wq", []),
        ("w_qkv.inner", []),
        ("", []),
    ],
)
def test_a_joined_cell_has_parts(path, parts):
    assert names.joined_parts(path) == parts


PARAMETERS = [
    ("model.tok_embeddings.embedding_weight", "model.embed_tokens.weight"),
    ("model.layers.3.attention_norm.weight", "model.layers.3.input_layernorm.weight"),
    ("model.layers.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ("model.norm_out.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("model.layers.3.attention.wq.bias", "model.layers.3.self_attn.q_proj.bias"),
    ("model.layers.3.feed_forward.w2.weight", "model.layers.3.mlp.down_proj.weight"),
]


@pytest.mark.parametrize("mindformers, hugging_face", PARAMETERS)
def test_each_parameter_of_a_llama_has_two_names(mindformers, hugging_face):
    assert names.parameter_to_hugging_face(mindformers) == hugging_face
    assert names.parameter_to_mindformers(hugging_face) == mindformers


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "wq.weight",
        "",
        "model.norm.bias",
    ],
)
def test_other_parameters_are_not_known(name):
    assert names.parameter_to_mindformers(name) is None and names.parameter_to_hugging_face(name) is None


@pytest.mark.parametrize(
    "name, module, belongs",
    [
        ("lm_head.weight", "lm_head", True),
        ("model.tok_embeddings.embedding_weight", "embed_tokens", True),
        ("model.tok_embeddings.embedding_weight", "tok_embeddings", True),
        ("model.norm_out.weight", "norm", True),
        ("model.layers.0.attention_norm.weight", "input_layernorm", True),
        ("model.norm_out.weight", "model.norm", True),
        ("model.layers.0.attention_norm.weight", "layers.1.input_layernorm", False),
        ("my_lm_head.weight", "lm_head", False),
        ("model.layers.0.attention_norm.weight", "norm", False),
        ("model.layers.0.attention_norm.weight", "model", False),
    ],
)
def test_a_parameter_belongs_to_a_module_by_an_end_of_its_path(name, module, belongs):
    assert names.belongs_to(name, module) == belongs


@pytest.mark.parametrize(
    "path, layer",
    [
        ("model.layers.12.attention.wq", 12),
        ("model.layers.1.experts.3.w1", 1),
        ("lm_head", None),
        ("", None),
        ("layer2.fc", None),
    ],
)
def test_the_layer_is_the_first_number_of_a_path(path, layer):
    assert names.layer_of(path) == layer


MCORE = [
    ("self_attention.linear_q", "attention.wq", "self_attn.q_proj"),
    ("self_attention.linear_proj", "attention.wo", "self_attn.o_proj"),
    ("mlp.gating", "feed_forward.w1", "mlp.gate_proj"),
    ("mlp.linear_fc2", "feed_forward.w2", "mlp.down_proj"),
    ("self_attention.linear_q_down_proj", "attention.wq_down", "self_attn.q_a_proj"),
    ("self_attention.linear_kvb", "attention.wkv_up", "self_attn.kv_b_proj"),
    ("mlp.shared_experts.hidden", "mlp.shared_experts.w3", "mlp.shared_experts.up_proj"),
    ("mlp.experts.weight1", "mlp.experts.weight1", "mlp.experts.gate_up_proj"),
    ("mlp.experts.weight2", "mlp.experts.weight2", "mlp.experts.down_proj"),
    ("mlp.router", "mlp.router", "mlp.gate"),
]


@pytest.mark.parametrize("mcore, mindformers, hugging_face", MCORE)
def test_a_cell_has_a_name_in_each_of_three_worlds(mcore, mindformers, hugging_face):
    own = [f"decoder.layers.7.{mcore}", f"model.layers.7.{mindformers}", f"model.layers.7.{hugging_face}"]
    for path in own:
        assert [names.to_mcore(path), names.to_mindformers(path), names.to_hugging_face(path)] == own
    # The cells of the network are below "model", and their parameters are not.
    assert names.to_mindformers("model." + own[0]) == own[1] and names.to_hugging_face("model." + own[0]) == own[2]
    assert set(names.aliases(own[0])) == set(own)


def test_ends_of_a_model_have_names_in_three_worlds():
    assert names.to_mcore("model.embed_tokens") == "embedding.word_embeddings" == names.to_mcore("model.tok_embeddings")
    assert names.to_hugging_face("embedding.word_embeddings") == "model.embed_tokens"
    assert names.to_mindformers("model.output_layer") == "lm_head" and names.to_mcore("lm_head") == "output_layer"
    assert names.is_output_head("output_layer") and names.is_embedding("embedding.word_embeddings")
    assert names.parameter_to_hugging_face("decoder.final_layernorm.weight") == "model.norm.weight"
    assert names.parameter_to_mcore("model.layers.1.self_attn.q_norm.weight") == (
        "decoder.layers.1.self_attention.q_layernorm.weight"
    )
    # One name of two worlds is of the one whose layers it is in.
    assert names.parameter_to_mindformers("decoder.layers.0.input_layernorm.weight") == (
        "model.layers.0.attention_norm.weight"
    )


def test_a_joined_cell_of_mcore_has_parts_in_mcore():
    start = "decoder.layers.0.self_attention."
    assert names.joined_parts(start + "linear_qkv") == [start + "linear_q", start + "linear_k", start + "linear_v"]
    assert names.joined_parts("mlp.linear_fc1") == ["mlp.gating", "mlp.hidden"]
    assert names.to_mindformers(start + "linear_qkv") == "model.layers.0.attention.w_qkv"
    assert names.to_mcore("model.layers.0.mlp.shared_experts.w_gate_hidden") == (
        "decoder.layers.0.mlp.shared_experts.linear_fc1"
    )


def test_the_cells_of_a_network_together_tell_what_linear_qkv_joins():
    start = "decoder.layers.0.self_attention."
    own = names.canonical([start + "linear_qkv", start + "linear_proj"])
    assert own[start + "linear_qkv"] == "model.layers.0.attention.w_qkv"
    latent = names.canonical([start + "linear_qkv", start + "linear_kvb"])
    assert latent[start + "linear_qkv"] == "model.layers.0.attention.w_qkv_down"
    assert (
        names.canonical([start + "linear_qkv"], among=["model." + start + "linear_kvb"]).popitem()[1].endswith("_down")
    )
    assert names.joined_parts("model.layers.0.attention.w_qkv_down") == [
        "model.layers.0.attention.wq_down",
        "model.layers.0.attention.wkv_down",
    ]


def test_routers_are_known_and_what_only_looks_like_one_is_not():
    for path in ("decoder.layers.0.mlp.router", "model.layers.0.mlp.gate"):
        assert names.is_router(path)
    for path in ("model.layers.0.mlp.gate_proj", "gate", "model.layers.0.attention.gate"):
        assert not names.is_router(path)


@pytest.mark.parametrize(
    "path, there",
    [
        ("model.layers.0.attention.wq", True),
        ("model.layers.0.attention.w_qkv", False),
        ("transformer.encoder.layers.0.self_attention.query_key_value", True),
        ("transformer.encoder.layers.0.self_attention.wq", False),
        ("transformer.h.0.self_attention.query_key_value", True),
        ("model.vision.patch", True),
    ],
)
def test_what_hugging_face_s_model_has(path, there):
    assert names.in_hugging_face(path) == there
