"""PEFT's adapter folder: its keys, and the adapter_config.json that is written."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mindlora.core.errors import ShapeMismatchError, UnexpectedTensorsError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import initial_pairs
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import peft, peft_config
from mindlora.files.adapters.dialects.peft_config import Extras

PATHS = st.sampled_from(
    [
        "model.layers.0.attention.wq",
        "model.layers.31.feed_forward.w2",
        "lm_head",
        "fc.0",
        "model.layers.0.attention.w_qkv",
        "attention.wo",
        "",
    ]
)
RANK, ALPHA, OUT, IN = 2, 6, 5, 4
NAME = "base_model.model.model.layers.0.self_attn.q_proj.{}"
Q = "model.layers.0.attention.wq"
CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "kasa_config": {"beta": 1e-4}}
A, B, DIAGONAL = NAME.format("lora_A.weight"), NAME.format("lora_B.weight"), NAME.format("lora_diag")


def adapter(ranks=None, alphas=None, **fields):
    """An adapter of zeros; ``ranks`` and ``alphas`` map paths to values, by default 2 and 3 for wq of layer 0."""
    ranks = ranks or {"model.layers.0.attention.wq": 2}
    tensors = {
        (path, half): np.zeros((rank, 6) if half == "A" else (6, rank), np.float32)
        for path, rank in ranks.items()
        for half in "AB"
    }
    return Adapter(tensors, alphas or dict.fromkeys(ranks, 3.0), **fields)


# Keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, half, key",
    [
        ("model.layers.3.attention.wq", "A", "base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"),
        ("model.layers.3.attention.wo", "B", "base_model.model.model.layers.3.self_attn.o_proj.lora_B.weight"),
        ("model.layers.0.feed_forward.w1", "A", "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"),
        ("model.layers.0.feed_forward.w2", "B", "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"),
        ("model.layers.0.feed_forward.w3", "A", "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"),
        ("lm_head", "A", "base_model.model.lm_head.lora_A.weight"),
    ],
)
def test_keys_are_peft_s(path, half, key):
    assert peft.tensor_key(path, half) == key
    assert peft.parse_key(key) == (path, half)


@given(PATHS, st.sampled_from("AB"))
def test_keys_make_the_round_trip(path, half):
    assert peft.parse_key(peft.tensor_key(path, half)) == (path, half)


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "base_model.model.lm_head.weight",
        "base_model.model.lm_head.lora_embedding_A.weight",
        "base_model.model.lm_head.lora_A.bias",
        "base_model.model.lm_head.lora_a.weight",
        "lm_head.mindpet_delta_lora_a",
        "",
    ],
)
def test_other_keys_are_not_the_adapter_s(key):
    assert peft.parse_key(key) is None


@pytest.mark.parametrize(
    "name, adapted, key",
    [
        ("lm_head.weight", [], "base_model.model.lm_head.weight"),
        ("lm_head.weight", ["lm_head"], "base_model.model.lm_head.base_layer.weight"),
        ("model.tok_embeddings.embedding_weight", [], "base_model.model.model.embed_tokens.weight"),
        ("model.norm_out.weight", ["lm_head"], "base_model.model.model.norm.weight"),
        ("model.layers.1.attention_norm.weight", [], "base_model.model.model.layers.1.input_layernorm.weight"),
        ("model.layers.1.attention.wq.bias", [], "base_model.model.model.layers.1.self_attn.q_proj.bias"),
        ("score.weight", [], "base_model.model.score.weight"),
    ],
)
def test_keys_of_saved_modules(name, adapted, key):
    assert peft.saved_module_key(name, adapted) == key
    assert peft.parse_saved_module_key(key) == name


@pytest.mark.parametrize(
    "key",
    [
        "lm_head.weight",
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.bias",
        "base_model.model.lm_head.lora_magnitude_vector",
        "base_model.model.lm_head.running_mean",
    ],
)
def test_other_keys_are_not_a_saved_module_s(key):
    assert peft.parse_saved_module_key(key) is None


# adapter_config.json --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha, kept", [(16, 16), (16.0, 16), (2.5, 2.5)])
def test_config_has_the_stable_fields(alpha, kept):
    ranks = {f"model.layers.{layer}.attention.{leaf}": 8 for layer in range(2) for leaf in ("wq", "wv")}
    config = peft.adapter_config(
        adapter(ranks, dict.fromkeys(ranks, alpha), dropout=0.1, base_model="meta-llama/Llama-2-7b")
    )
    assert config == {
        "alpha_pattern": {},
        "base_model_name_or_path": "meta-llama/Llama-2-7b",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": kept,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 8,
        "rank_pattern": {},
        "target_modules": [
            f"model.layers.{layer}.self_attn.{leaf}" for layer in range(2) for leaf in ("q_proj", "v_proj")
        ],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    assert isinstance(config["lora_alpha"], type(kept))


def test_pairs_that_deviate_are_in_the_patterns_under_their_full_paths():
    ranks = {
        "model.layers.0.attention.wq": 4,
        "model.layers.1.attention.wq": 4,
        "model.layers.2.attention.wq": 8,
        "lm_head": 1,
    }
    alphas = dict(zip(ranks, [5.0, 6.0, 6.0, 2.5]))
    config = peft.adapter_config(adapter(ranks, alphas, use_rslora=True))
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 6, True)
    assert config["rank_pattern"] == {"model.layers.2.self_attn.q_proj": 8, "lm_head": 1}
    assert config["alpha_pattern"] == {"model.layers.0.self_attn.q_proj": 5, "lm_head": 2.5}


@pytest.mark.parametrize("values", [(1, 2, 3, 3), (3, 2, 1, 1), (2, 3, 3, 1), (1, 1, 2, 3), (1, 2, 3, 4)])
def test_ranks_and_alphas_are_read_as_they_are_written_even_where_a_name_ends_in_another(tmp_path, values):
    paths = ["0", "1.0", "lm_head", "model.draft.lm_head"]
    ranks, alphas = dict(zip(paths, values)), dict(zip(paths, (value / 2 for value in values)))
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(peft.adapter_config(adapter(ranks, alphas))))
    config = peft_config.read(str(path))
    assert {path: config.rank_of(path) for path in paths} == ranks
    assert {path: config.alpha_of(path) for path in paths} == alphas


@pytest.mark.parametrize(
    "selection",
    [
        {
            "target_modules": ["q_proj"],
            "exclude_modules": ["k_proj"],
            "layers_to_transform": [0, 1],
            "layers_pattern": "layers",
        },
        {"target_modules": r".*\.q_proj"},
    ],
)
def test_a_selection_is_written_as_it_is(selection):
    config = peft.adapter_config(adapter(selection=selection))
    assert {field: config[field] for field in selection} == selection


@pytest.mark.parametrize(
    "names, adapted, modules",
    [
        (["lm_head.weight"], "model.layers.0.attention.wq", ["lm_head"]),
        (
            ["model.norm_out.weight", "model.tok_embeddings.embedding_weight"],
            "lm_head",
            ["model.embed_tokens", "model.norm"],
        ),
        (
            ["model.layers.0.attention.wk.weight", "model.layers.0.attention.wk.bias"],
            "lm_head",
            ["model.layers.0.self_attn.k_proj"],
        ),
        # The base's own weight of an adapted module does not count as a trained module.
        (["lm_head.weight", "score.weight"], "lm_head", ["score"]),
        (["lm_head.weight"], "lm_head", None),
        ([], "", None),
    ],
)
def test_modules_to_save_names_the_saved_modules(names, adapted, modules):
    saved_modules = {name: np.zeros((2, 2), np.float32) for name in names}
    assert peft.adapter_config(adapter({adapted: 2}, saved_modules=saved_modules))["modules_to_save"] == modules


@pytest.mark.parametrize(
    "name, module, expected",
    [
        ("model.layers.0.attention_norm.weight", "input_layernorm", True),
        ("model.layers.0.attention_norm.weight", "norm", True),
        ("model.norm_out.weight", "model.norm", True),
        ("model.norm_out.weight", "norm_out", False),
        ("lm_head.weight", "lm_head", True),
        ("lm_head.weight", "lm_head.weight", False),
        ("model.tok_embeddings.embedding_weight", "embed_tokens", True),
    ],
)
def test_modules_are_matched_by_the_end_of_their_hugging_face_name(name, module, expected):
    assert peft.is_of_module(name, module) is expected


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    shapes = {A: (RANK, IN), B: (OUT, RANK), DIAGONAL: (RANK,)}
    return {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}


def read(folder, tensors, config=CONFIG, **extras):
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return adapter_files.read(str(folder), extras=Extras(**{"initial_pairs": True, **extras}))


def test_the_smallest_singular_values_go_and_the_diagonal_is_in_b(tmp_path, tensors):
    weight = np.random.default_rng(1).normal(size=(OUT, IN)).astype(np.float32)
    adapter = read(tmp_path, tensors)
    initial_pairs.complete(adapter, initial_pairs.Base({Q}, {Q: weight}.__getitem__, lambda path: (None, None)))
    assert adapter.rank(Q) == 2 * RANK and adapter.initializer is adapter.initialization is None
    u, s, vt = np.linalg.svd(weight, full_matrices=False)
    kept = u[:, :-RANK] * s[:-RANK] @ vt[:-RANK]
    expected = kept + ALPHA / RANK * tensors[B] @ np.diag(tensors[DIAGONAL]) @ tensors[A]
    np.testing.assert_allclose(weight + adapter.delta(Q), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({DIAGONAL: None}, UnexpectedTensorsError, "holds one of lora_diag and lora_B of .*q_proj alone"),
        (
            {NAME.replace("q_", "v_").format("lora_diag"): np.ones(2, np.float32)},
            UnexpectedTensorsError,
            "v_proj alone",
        ),
        ({DIAGONAL: np.ones(3, np.float32)}, ShapeMismatchError, r"lora_diag is \[3\], and .*lora_B.weight \[5, 2\]"),
    ],
)
def test_damaged_files(change, error, message, tmp_path, tensors):
    kept = {key: array for key, array in {**tensors, **change}.items() if array is not None}
    with pytest.raises(error, match=message):
        read(tmp_path, kept)


def test_a_diagonal_that_the_configuration_does_not_declare_is_refused(tmp_path, tensors):
    with pytest.raises(UnexpectedTensorsError, match="not LoRA's: .*q_proj.lora_diag"):
        read(tmp_path, tensors, {**CONFIG, "kasa_config": None})


def test_inspect_says_what_it_is(tmp_path, tensors):
    refusals = []
    read(tmp_path, tensors, initial_pairs=False, refusals=refusals)
    assert "so the adapter belongs to a base without its smallest singular values" in refusals[0]
