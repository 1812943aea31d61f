"""Which cells target_modules and exclude_modules select, and the errors and warnings where they select too little."""

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindlora.core.errors import LoraError, TargetError
from mindlora.models.target_modules import _split_alternatives, select_targets

LEAVES = [
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.wo",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
]
LAYERS = [f"model.layers.{i}.{leaf}" for i in range(3) for leaf in LEAVES]
LLAMA = LAYERS + ["lm_head"]
JOINED = [
    "layers.0.attention.w_qkv",
    "layers.0.attention.wo",
    "layers.0.feed_forward.w_gate_hidden",
    "layers.0.feed_forward.w2",
    "lm_head",
]
CANDIDATES = (
    " Choose from the network's linear cells: model.layers.{0..2}.attention.wq, model.layers.{0..2}.attention.wk, "
    "model.layers.{0..2}.attention.wv, model.layers.{0..2}.attention.wo, "
    "model.layers.{0..2}.feed_forward.w1, model.layers.{0..2}.feed_forward.w2, "
    "model.layers.{0..2}.feed_forward.w3, lm_head."
)
OTHERS = {
    "": "LlamaForCausalLM",
    "model": "LlamaModel",
    "model.layers.0.attention": "LLamaAttention",
    "model.layers.0.attention_norm": "LlamaRMSNorm",
    "conv1": "Conv2d",
}


def paths(*leaves, layers=range(3)):
    return [path for path in LAYERS if any(path.endswith(f"layers.{i}.{leaf}") for i in layers for leaf in leaves)]


def refusal(*arguments, **options):
    with pytest.raises(TargetError) as error:
        select_targets(*arguments, **options)
    assert isinstance(error.value, LoraError)
    return str(error.value)


@pytest.mark.parametrize(
    "target_modules, selected",
    [
        # A regular expression that matches full paths.
        (r"model\.layers\.1\.attention\.w[qv]", paths("attention.wq", "attention.wv", layers=[1])),
        (r".*\.attention\.w(q|v)", paths("attention.wq", "attention.wv")),
        (
            r".*layers\.[02]\.feed_forward\.w\d",
            paths("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", layers=[0, 2]),
        ),
        (r"lm_head", ["lm_head"]),
        (r".*", LLAMA),
        # A regular expression as in MindFormers, which matches module names from their beginning.
        (".*wq|.*wk|.*wv|.*wo", paths("attention.wq", "attention.wk", "attention.wv", "attention.wo")),
        ("wq|w2", paths("attention.wq", "feed_forward.w2")),
        ("w", LAYERS),
        # A list of suffixes.
        (["wq"], paths("attention.wq")),
        (["attention.wv", "w2"], paths("attention.wv", "feed_forward.w2")),
        (["model.layers.1.attention.wo", "lm_head"], paths("attention.wo", layers=[1]) + ["lm_head"]),
        (("wq", "wk"), paths("attention.wq", "attention.wk")),
        # All linear cells except the output head.
        ("all-linear", LAYERS),
        # Hugging Face's names.
        ("q_proj", paths("attention.wq")),
        ("q_proj|up_proj", paths("attention.wq", "feed_forward.w3")),
        (r".*self_attn\.(q|v)_proj", paths("attention.wq", "attention.wv")),
        (["q_proj", "mlp.down_proj"], paths("attention.wq", "feed_forward.w2")),
        (["model.layers.2.self_attn.o_proj"], paths("attention.wo", layers=[2])),
        (["wq", "v_proj"], paths("attention.wq", "attention.wv")),
    ],
)
def test_what_each_form_selects(target_modules, selected):
    assert select_targets(LLAMA, target_modules) == selected


@pytest.mark.parametrize(
    "exclude_modules, selected",
    [
        (["layers.0.attention.wq"], paths("attention.wq", layers=[1, 2])),
        (r".*layers\.[01]\..*", paths("attention.wq", layers=[2])),
        (["model.layers.1.self_attn.q_proj", "w2"], paths("attention.wq", layers=[0, 2])),
        ("lm_head", paths("attention.wq")),
    ],
)
def test_exclude_modules(exclude_modules, selected):
    assert select_targets(LLAMA, "wq", exclude_modules) == selected


def test_order_is_that_of_the_network():
    assert select_targets(["b.wq", "a.wq", "c.wk"], ["wk", "wq"]) == ["b.wq", "a.wq", "c.wk"]


@pytest.mark.parametrize(
    "target_modules",
    [
        "query",
        r"attention\.wq",
        r"self_attn\.(q|v)_proj",
        ["q"],
        ["tention.wq"],
        ["layers.*.attention.wq"],
        ["all-linear"],
    ],
)
def test_no_match_is_an_error_that_lists_the_candidates(target_modules):
    assert refusal(LLAMA, target_modules) == f"target_modules {target_modules!r} matches no linear cell." + CANDIDATES


def test_a_long_list_of_candidates_is_shortened():
    message = refusal([f"model.layers.{i}.attention.wq" for i in range(32)] + ["lm_head"], "query")
    assert message.endswith("Choose from the network's linear cells: model.layers.{0..31}.attention.wq, lm_head.")


def test_an_item_of_a_list_that_matches_nothing_is_an_error_that_names_it():
    assert refusal(LLAMA, ["wq", "wk", "query", "w4"]) == (
        "target_modules ['wq', 'wk', 'query', 'w4']: 'query', 'w4' matches no linear cell." + CANDIDATES
    )
    assert refusal(LLAMA, "wq", ["wk", "w9"]).startswith("exclude_modules ['wk', 'w9']: 'w9' matches no linear cell.")


def test_an_alternative_of_a_regex_that_matches_nothing_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "mindlora"):
        assert select_targets(LLAMA, ".*wq|.*query|.*(wk|key)") == paths("attention.wq", "attention.wk")
    assert [record.getMessage() for record in caplog.records] == [
        "target_modules '.*wq|.*query|.*(wk|key)': '.*query' matches no linear cell."
        + CANDIDATES
        + " The other alternatives match 6 cells: remove this one."
    ]


def test_a_regex_whose_alternatives_all_match_gives_no_warning(caplog):
    select_targets(LLAMA, ".*wq|.*wk|.*w[13]|lm_head")
    select_targets(LLAMA, r"(.*)(wq)|()(.*)wk")
    assert not caplog.records


@pytest.mark.parametrize("pattern", [r".*(w)q|.*\1k", r".*w[]q|]", r".*w[^]k|]"])
def test_a_regex_whose_pieces_are_no_regexes_is_not_split(pattern):
    expected = [path for path in LLAMA if re.fullmatch(pattern, path)]
    assert select_targets(LLAMA, pattern) == expected != []


@pytest.mark.parametrize(
    "target_modules, said",
    [
        (
            r".*attention",
            "'.*attention' does match model.layers.0.attention, but that is a LLamaAttention and not a linear cell.",
        ),
        (
            ["attention"],
            "'attention' does match model.layers.0.attention, but that is a LLamaAttention and not a linear cell.",
        ),
        ("conv1", "'conv1' does match conv1, but that is a Conv2d and not a linear cell."),
        (["wq", "conv1"], "'conv1' does match conv1, but that is a Conv2d and not a linear cell."),
    ],
)
def test_a_match_of_another_kind_of_cell_is_named(target_modules, said):
    assert f"matches no linear cell. {said} Choose from the network's linear cells: " in refusal(
        LLAMA, target_modules, None, OTHERS
    )


def test_excluding_everything_is_an_error():
    assert refusal(LLAMA, "wq", "w") == (
        "exclude_modules 'w' excludes all 3 cells that target_modules 'wq' selects: model.layers.{0..2}.attention.wq. "
        "Exclude fewer of them."
    )


def test_a_network_without_linear_cells_is_an_error():
    assert refusal([], "wq") == (
        "The network holds no linear cell (nn.Dense, mint.nn.Linear or MindFormers' Linear) to put LoRA on: pass "
        "one that does."
    )


def test_all_linear_of_a_network_with_only_an_output_head_is_an_error():
    assert refusal(["lm_head"], "all-linear") == (
        "target_modules 'all-linear' leaves output heads out, and the network has no other linear cell. "
        "Choose from the network's linear cells: lm_head."
    )


def test_no_target_modules_is_an_error():
    assert refusal(LLAMA, None) == (
        "target_modules is missing: name the linear cells that get an adapter, for "
        "instance '.*wq|.*wk|.*wv|.*wo' or 'all-linear'." + CANDIDATES
    )


@pytest.mark.parametrize(
    "target_modules, selected",
    [
        (["wq", "wk", "wv"], JOINED[:1]),
        (".*wq|.*wk|.*wv|.*wo", JOINED[:2]),
        (["q_proj", "k_proj", "v_proj"], JOINED[:1]),
        (["w_qkv"], JOINED[:1]),
        (".*w_qkv", JOINED[:1]),
        (["w1", "w3"], JOINED[2:3]),
        ("w1|w2|w3", JOINED[2:4]),
        (["w_gate_hidden", "w2"], JOINED[2:4]),
        ("all-linear", JOINED[:4]),
    ],
)
def test_a_joined_cell_is_selected_by_all_its_parts_or_its_own_name(target_modules, selected, caplog):
    assert select_targets(JOINED, target_modules) == selected
    assert not caplog.records


@pytest.mark.parametrize(
    "target_modules, message",
    [
        (
            ["wq", "wv"],
            "target_modules names wq, wv, but here layers.0.attention.w_qkv holds wq, wk, wv in one cell. Name "
            "w_qkv, or wk as well, or build the model with qkv_concat: False.",
        ),
        (
            ".*wq|.*wv|.*wo",
            "target_modules names wq, wv, but here layers.0.attention.w_qkv holds wq, wk, wv in one cell. "
            "Name w_qkv, or wk as well, or build the model with qkv_concat: False.",
        ),
        (
            ["q_proj"],
            "target_modules names wq, but here layers.0.attention.w_qkv holds wq, wk, wv in one cell. Name w_qkv, "
            "or wk, wv as well, or build the model with qkv_concat: False.",
        ),
        (
            "w1|w2",
            "target_modules names w1, but here layers.0.feed_forward.w_gate_hidden holds w1, w3 in one cell. Name "
            "w_gate_hidden, or w3 as well, or build the model with qkv_concat: False.",
        ),
    ],
)
def test_a_part_of_a_joined_cell_is_an_error(target_modules, message):
    assert refusal(JOINED, target_modules) == message


def test_a_part_of_a_joined_cell_cannot_be_excluded_either():
    assert refusal(JOINED, "all-linear", ["wk"]).startswith("exclude_modules names wk, but here ")
    assert select_targets(JOINED, "all-linear", ["w_qkv"]) == JOINED[1:4]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@given(st.text(alphabet="w|()[]\\.*q^", max_size=20))
def test_alternatives_joined_give_the_regex_again(pattern):
    assert "|".join(_split_alternatives(pattern)) == pattern


@given(st.lists(st.sampled_from(["wq", r"w\|k", "(a|b)c", "[|]x", r"\(|\)"[:2], r".*layers\.0\.", ""]), min_size=1))
def test_only_bars_outside_brackets_split(pieces):
    assert _split_alternatives("|".join(pieces)) == pieces


@given(st.sets(st.sampled_from(LLAMA), min_size=1))
def test_a_list_of_full_paths_selects_just_these(chosen):
    assert set(select_targets(LLAMA, sorted(chosen))) == chosen
    assert set(select_targets(LLAMA, "|".join(re.escape(path) for path in sorted(chosen)))) == chosen


@pytest.mark.parametrize("layers, chosen", [(1, ["1"]), ([0, 2], ["0", "2"]), ((2,), ["2"])])
def test_layers_to_transform_selects_only_those_layers(layers, chosen):
    paths = [f"model.layers.{layer}.attention.{leaf}" for layer in range(3) for leaf in ("wq", "wk")]
    assert select_targets(paths, ["wq"], layers=layers) == [f"model.layers.{layer}.attention.wq" for layer in chosen]


def test_a_layer_without_a_target_is_named():
    paths = [f"model.layers.{layer}.attention.wq" for layer in range(2)] + ["lm_head"]
    with pytest.raises(TargetError) as error:
        select_targets(paths, ["wq", "lm_head"], layers=[1, 2, 7])
    assert str(error.value) == (
        "layers_to_transform names 2, 7, where target_modules selects nothing. Choose layers of its "
        "cells: "
        "model.layers.{0..1}.attention.wq, lm_head."
    )


@pytest.mark.parametrize("router", ["decoder.layers.0.mlp.router", "model.layers.0.mlp.gate"])
def test_all_linear_leaves_routers_out_and_a_name_takes_them(router):
    paths = [router, "decoder.layers.0.mlp.shared_experts.linear_fc1", "output_layer"]
    assert select_targets(paths, "all-linear") == paths[1:2]
    assert select_targets(paths, [router.rpartition(".")[2]]) == [router]


def test_all_linear_leaves_out_what_is_not_linear_and_a_name_takes_it():
    paths = ["tok_embeddings", "layers.0.attention.wq", "conv"]
    assert select_targets(paths, "all-linear", not_linear=["tok_embeddings", "conv"]) == paths[1:2]
    assert select_targets(paths, ["conv"], not_linear=["tok_embeddings", "conv"]) == ["conv"]
    assert "The network holds no linear cell" in refusal(["conv"], "all-linear", not_linear=["conv"])


@pytest.mark.parametrize("spec", [["q_proj", "k_proj", "v_proj"], ["linear_qkv"], ["wq", "wk", "wv"], ".*[qkv]_proj"])
def test_a_joined_cell_of_mcore_is_selected_under_any_world_s_names(spec):
    paths = [f"model.decoder.layers.0.{cell}" for cell in ("self_attention.linear_qkv", "self_attention.linear_proj")]
    assert select_targets(paths, spec) == paths[:1]


def test_deepseek_s_latents_are_selected_under_hugging_face_s_names():
    paths = [f"decoder.layers.0.self_attention.{cell}" for cell in ("linear_qkv", "linear_qb", "linear_kvb")]
    assert select_targets(paths, ["q_a_proj", "kv_a_proj_with_mqa"]) == paths[:1]
    assert select_targets(paths, ["q_b_proj"]) == paths[1:2]
    with pytest.raises(TargetError, match="Name linear_qkv, or kv_a_proj_with_mqa as well."):
        select_targets(paths, ["q_a_proj"])
