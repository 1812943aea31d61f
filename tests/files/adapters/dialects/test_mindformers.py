"""MindFormers' own names of LoRA tensors, in checkpoints with and without the rest of the training state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindlora.files.adapters.dialects import mindformers
from mindlora.files.adapters.dialects.mindformers import MCORE, MINDPET, PYNATIVE, SLORA, TK_DELTA

LAYER = "decoder.layers.3."
# MindFormers' mcore cell -> its path in MindFormers' Llama.
MCORE_CELLS = [
    (LAYER + "self_attention.linear_qkv", "model.layers.3.attention.w_qkv"),
    (LAYER + "self_attention.linear_q", "model.layers.3.attention.wq"),
    (LAYER + "self_attention.linear_k", "model.layers.3.attention.wk"),
    (LAYER + "self_attention.linear_v", "model.layers.3.attention.wv"),
    (LAYER + "self_attention.linear_proj", "model.layers.3.attention.wo"),
    (LAYER + "mlp.linear_fc1", "model.layers.3.feed_forward.w_gate_hidden"),
    (LAYER + "mlp.gating", "model.layers.3.feed_forward.w1"),
    (LAYER + "mlp.linear_fc2", "model.layers.3.feed_forward.w2"),
    (LAYER + "mlp.hidden", "model.layers.3.feed_forward.w3"),
    ("output_layer", "lm_head"),
]


@pytest.mark.parametrize(
    "path, half, key",
    [
        ("model.layers.3.attention.wq", "A", "model.layers.3.attention.wq.mindpet_delta_lora_a"),
        ("lm_head", "B", "lm_head.mindpet_delta_lora_b"),
        ("", "A", "mindpet_delta_lora_a"),
        ("", "B", "mindpet_delta_lora_b"),
    ],
)
def test_keys_are_those_of_mindformers(path, half, key):
    assert mindformers.tensor_key(path, half) == key
    assert mindformers.parse_key(key) == (path, half)


@pytest.mark.parametrize(
    "key, part_key",
    [
        ("mindpet_delta_lora_A", ("", "A")),
        ("mindpet_delta_lora_B", ("", "B")),
        ("dense.mindpet_delta_lora_A", ("dense", "A")),
    ],
)
def test_capital_letters_mean_the_same(key, part_key):
    assert mindformers.parse_key(key) == part_key


@pytest.mark.parametrize("prefix", ["adam_m.", "adam_v.", "moments.", "moment1.", "moment2.", "accu_grads."])
@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.attention.wq.mindpet_delta_lora_a",
        "mindpet_delta_lora_b",
        "wq.tk_delta_lora_a",
        "wq.lora_b",
        "decoder.layers.0.mlp.linear_fc1.lora_A.weight",
        "decoder.layers.0.mlp.experts.weight1_lora_a",
    ],
)
def test_the_tensors_of_the_optimizer_are_not_the_adapter_s(prefix, key):
    assert mindformers.is_adapter_key(key) and mindformers.detect([key]) is not None
    assert not mindformers.is_adapter_key(prefix + key) and mindformers.detect([prefix + key]) is None
    assert mindformers.parse_expert_key(prefix + key) is None
    assert all(mindformers.parse_key(prefix + key, dialect) is None for dialect in mindformers.KEY_NAMES)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.attention.wq.weight",
        "lm_head.weight",
        "global_step",
        "epoch_num",
        "loss_scale",
        "",
        "wq.mindpet_delta_lora_alpha",
        "wq.mindpet_delta_lora_a.weight",
        "wq.lora_a",
        "base_model.model.lm_head.lora_A.weight",
    ],
)
def test_keys_of_the_base_and_other_entries_are_not_the_adapter_s(key):
    assert mindformers.parse_key(key) is None


@given(
    st.lists(st.sampled_from(["model", "layers", "0", "wq", "adamant", "momentum"]), max_size=4).map(".".join),
    st.sampled_from("AB"),
    st.sampled_from([MINDPET, TK_DELTA, SLORA, PYNATIVE]),
)
def test_keys_make_the_round_trip(path, half, dialect):
    assert mindformers.parse_key(mindformers.tensor_key(path, half, dialect), dialect) == (path, half)


@pytest.mark.parametrize("cell, path", MCORE_CELLS)
@pytest.mark.parametrize(
    "dialect, ending_a, ending_b", [(MCORE, ".lora_A.weight", ".lora_B.weight"), (PYNATIVE, ".lora_a", ".lora_b")]
)
def test_the_cells_of_mcore_are_those_of_the_llama(cell, path, dialect, ending_a, ending_b):
    for half, ending in (("A", ending_a), ("B", ending_b)):
        key = cell + ending
        assert mindformers.detect([key, "decoder.final_layernorm.weight"]) is dialect
        assert mindformers.parse_key(key, dialect) == (path, half) and mindformers.is_adapter_key(key)
        assert mindformers.tensor_key(cell, half, dialect) == key


def test_names_that_only_look_like_mcore_s_stay():
    for key, path in [
        ("decoder.layers.3.cross.linear_qkvx.lora_a", "model.layers.3.cross.linear_qkvx"),
        ("my.decoder.layers.3.mlp.experts_fc1.lora_a", "my.decoder.layers.3.mlp.experts_fc1"),
        ("my_output_layer.lora_a", "my_output_layer"),
    ]:
        assert mindformers.parse_key(key, PYNATIVE) == (path, "A")


@pytest.mark.parametrize(
    "keys, dialect",
    [
        (["model.layers.0.attention.wq.mindpet_delta_lora_a", "lm_head.weight"], MINDPET),
        (["mindpet_delta_lora_A"], MINDPET),
        (["model.layers.0.attention.wq.tk_delta_lora_a"], TK_DELTA),
        (["tk_delta_lora_B"], TK_DELTA),
        (["model.layers.0.attention.wq.lora_a"], SLORA),
        (["decoder.layers.0.self_attention.linear_qkv.lora_a", "lm_head.lora_a"], PYNATIVE),
        (["decoder.layers.0.mlp.experts.weight2_lora_b"], PYNATIVE),
        (["output_layer.lora_A.weight"], MCORE),
        (["model.layers.0.attention.wq.lora_A.weight"], None),
        (["model.layers.0.attention.wq.weight"], None),
        ([], None),
    ],
)
def test_the_form_of_a_file_follows_from_its_keys(keys, dialect):
    assert mindformers.detect(keys) is dialect


@pytest.mark.parametrize(
    "key",
    [
        "decoder.layers.0.mlp.linear_fc1.lora_a",
        "x.experts.weight3_lora_a",
        "x.experts.weight1_lora_c",
        "x.experts.weight1",
        "x.experts.weight1_lora_a.weight",
    ],
)
def test_other_tensors_are_no_experts(key):
    assert mindformers.parse_expert_key(key) is None
