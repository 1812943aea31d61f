"""Qwen3's network for serving: checkpoints in any names fill it alike, and adapters of MindFormers' cells are for it.

tests/peers/test_served_models.py compares what it says with transformers and PEFT.
"""

import mindspore as ms
import numpy as np
import pytest

from mindlora.core.errors import BaseMismatchError, CheckpointError, ConfigError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.fingerprint import ROW_ORDERS, fingerprint_from, sampled_elements, sampled_paths
from mindlora.files.adapters.joined_pairs import split_pairs
from mindlora.files.base.convert import convert_base
from mindlora.models import names
from mindlora.network.adapter_matching import cell_shapes
from mindlora.network.base_fingerprint import joined_fingerprints_of
from mindlora.network.load_base import load_base
from mindlora.network.tensors import to_array
from mindlora.serving.mcore_network import FeedForward, JoinedFeedForward
from mindlora.serving.mcore_operators import dtypes_of
from mindlora.serving.network import build_network, linear_cells, stacked_experts
from mindlora.serving.packed_adapter import ServedLayout, prepare
from mindlora.serving.settings import EngineSettings
from tests.support.llama_checkpoints import load, save_base
from tests.support.mcore_checkpoints import (
    CONFIG,
    EXPERT_INNER,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    VOCAB,
    qwen3,
)

MODEL_CONFIG = {
    "architectures": "Qwen3ForCausalLM",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    **CONFIG,
}
SETTINGS = EngineSettings(seq_length=16, max_running=1, max_tokens_per_step=4)
# Rows of linear_qkv, by hand: for each key-value head its two heads of q, then k, then v.
GROUP = HEADS // KV_HEADS
PARTS = ("gate_proj", "up_proj", "down_proj")
# Paths that adapters are kept under.
QKV, OUT = "model.layers.{}.attention.w_qkv", "model.layers.{}.attention.wo"


def network(**keys):
    return build_network({"model_config": {**MODEL_CONFIG, **keys}}, SETTINGS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same base under Hugging Face's names and under mcore's."""
    folder = tmp_path_factory.mktemp("base")
    made = save_base(folder / "hf", qwen3(), **CONFIG)
    convert_base(made, str(folder / "mcore.safetensors"), None, "mcore")
    return made, str(folder / "mcore.safetensors")


@pytest.fixture(scope="module")
def filled(checkpoints):
    """A network with the base's weights."""
    made = network()
    load_base(made, checkpoints[0])
    return made


def test_checkpoints_in_either_names_fill_the_same_network(filled, checkpoints):
    other = network()
    load_base(other, checkpoints[1])
    arrays = {parameter.name: parameter.asnumpy() for parameter in other.get_parameters()}
    expected = {name: to_float32(array) for name, array in load(checkpoints[0]).items()}
    assert arrays.keys() - expected.keys() == {name for name in arrays if name.endswith("_cache")}
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)
        np.testing.assert_array_equal(filled.parameters_dict()[name].asnumpy(), array)


@pytest.mark.parametrize("stacked", [False, True], ids=["single", "stacked"])
def test_experts_are_stacked_whatever_the_checkpoint_has(tmp_path, stacked):
    tensors = qwen3(experts=EXPERTS, stacked=stacked)
    source = save_base(tmp_path / "hf", tensors, **CONFIG)
    convert_base(source, str(tmp_path / "mcore.safetensors"), None, "mcore")
    keys = {"architectures": "Qwen3MoeForCausalLM", "num_experts": EXPERTS, "moe_intermediate_size": EXPERT_INNER}
    start, wide = "model.layers.1.mlp.experts.", {name: to_float32(array) for name, array in tensors.items()}
    if stacked:
        expected = {name: wide[f"{start}{name}"] for name in ("gate_up_proj", "down_proj")}
    else:
        matrix = {part: [wide[f"{start}{expert}.{part}.weight"] for expert in range(EXPERTS)] for part in PARTS}
        both = np.concatenate([matrix["gate_proj"], matrix["up_proj"]], axis=1)
        expected = {"gate_up_proj": both, "down_proj": np.stack(matrix["down_proj"])}
    for checkpoint in (source, str(tmp_path / "mcore.safetensors")):
        made = network(**keys)
        load_base(made, checkpoint)
        for name, array in expected.items():
            np.testing.assert_array_equal(made.parameters_dict()[f"{start}{name}"].asnumpy(), array)
    # Adapters are trained on mcore's weights, whose fingerprint they hold.
    weights = {}
    for path, cell in stacked_experts(made).items():
        weights.update({f"{path}.{name}": to_array(getattr(cell, name)) for name in cell.shapes})
    trained = load(str(tmp_path / "mcore.safetensors"))
    path = "decoder.layers.1.mlp.experts.weight1"
    array = to_float32(trained[path])
    assert joined_fingerprints_of(weights, KV_HEADS, {})([f"{start}gate_up_proj"]) == fingerprint_from(
        {path: array.shape}, {path: sampled_elements(array)}
    )


@pytest.mark.parametrize("tied", [False, True], ids=["a head of its own", "tied"])
def test_linear_weights_and_the_embedding_are_held_in_params_dtype(checkpoints, tied):
    made = network(params_dtype="bfloat16", tie_word_embeddings=tied)
    load_base(made, checkpoints[0])
    for name, array in load(checkpoints[0]).items():
        if tied and name == "lm_head.weight":
            continue
        parameter = made.parameters_dict()[name]
        held = name.endswith(("proj.weight", "lm_head.weight", "embed_tokens.weight"))
        assert parameter.dtype == (ms.bfloat16 if held else ms.float32)
        np.testing.assert_array_equal(to_float32(to_array(parameter)), to_float32(array))


def test_a_qwen2_has_the_biases_of_its_yaml_and_no_norms_of_heads(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {name: array for name, array in qwen3().items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        tensors[name.replace("weight", "bias")] = rng.normal(size=len(tensors[name])).astype(np.float32)
    source = save_base(tmp_path / "qwen2", tensors, model_type="qwen2", **CONFIG)
    made = network(architectures="Qwen2ForCausalLM", add_qkv_bias=True)
    load_base(made, source)
    held = {name for name in made.parameters_dict() if not name.endswith("_cache")}
    assert held == tensors.keys()
    np.testing.assert_array_equal(
        made.model.layers[1].self_attn.k_proj.bias.asnumpy(), tensors["model.layers.1.self_attn.k_proj.bias"]
    )
    with pytest.raises(CheckpointError, match="has biases that the network lacks: .* Set model.model_config"):
        load_base(network(architectures="Qwen2ForCausalLM"), source)


def test_a_tied_head_is_the_embedding(tmp_path):
    made = network(tie_word_embeddings=True)
    load_base(made, save_base(tmp_path / "tied", qwen3(tied=True), **CONFIG))
    assert made.lm_head.weight is made.model.embed_tokens.weight
    with pytest.raises(CheckpointError, match="lacks 1 parameters of the network: lm_head.weight"):
        load_base(network(), str(tmp_path / "tied"))


@pytest.mark.parametrize("kind", [FeedForward, JoinedFeedForward])
def test_a_feed_forward_network_is_down_of_the_gated_up(library, kind):
    rng = np.random.default_rng(4)
    gate, up = rng.normal(size=(2, INNER, HIDDEN)).astype(np.float32)
    down, x = (rng.normal(size=shape).astype(np.float32) for shape in ((HIDDEN, INNER), (3, HIDDEN)))
    made = kind(HIDDEN, INNER, dtypes_of({}))
    weights = {"gate_proj": gate, "up_proj": up, "gate_up_proj": np.concatenate([gate, up]), "down_proj": down}
    for name, cell in made.name_cells().items():
        if name in weights:
            cell.weight.set_data(ms.Tensor(weights[name]))
    gated = x @ gate.T
    expected = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    np.testing.assert_allclose(made(ms.Tensor(x)).asnumpy(), expected, rtol=1e-4, atol=1e-3)


def joined_adapter(paths, **fields):
    """Returns an adapter of rank 2 on cells as mcore has them."""
    rng, adapter = np.random.default_rng(3), Adapter({}, **fields)
    sizes = {"w_qkv": (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM), "wo": (HEADS * HEAD_DIM, HIDDEN)}
    for path in paths:
        wide, high = sizes[path.rpartition(".")[2]]
        adapter.tensors[path, "A"] = rng.normal(size=(2, wide)).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(high, 2)).astype(np.float32)
        adapter.alphas[path] = 4.0
    return adapter


def layout_of(filled):
    cells = linear_cells(filled)
    weights = {path: to_array(cell.weight) for path, cell in cells.items()}
    first, *others = (joined_fingerprints_of(weights, KV_HEADS, layouts) for layouts in ROW_ORDERS)
    return ServedLayout(cell_shapes(filled, cells), 2, fingerprint=first, other_fingerprints=tuple(others))


def test_a_pair_of_joined_cells_is_split_with_its_rank(filled, tmp_path):
    adapter = joined_adapter([QKV.format(1), OUT.format(0)])
    deltas = {key[0]: 2 * adapter.tensors[key[0], "B"] @ adapter.tensors[key[0], "A"] for key in adapter.tensors}
    files.write(adapter, str(tmp_path / "adapter.safetensors"), "mcore")
    packed = prepare(str(tmp_path / "adapter.safetensors"), layout_of(filled))
    heads = deltas[QKV.format(1)].reshape(KV_HEADS, GROUP + 2, HEAD_DIM, HIDDEN)
    attention = "model.layers.1.self_attn."
    expected = {
        f"{attention}q_proj": heads[:, :GROUP].reshape(-1, HIDDEN),
        f"{attention}k_proj": heads[:, GROUP].reshape(-1, HIDDEN),
        f"{attention}v_proj": heads[:, GROUP + 1].reshape(-1, HIDDEN),
        "model.layers.0.self_attn.o_proj": deltas[OUT.format(0)],
    }
    assert packed.blocks.keys() == expected.keys() and packed.rank_max == 2
    for path, delta in expected.items():
        rows, scale, _ = packed.blocks[path]
        wide = delta.shape[1]
        np.testing.assert_allclose(scale * rows[:, wide:].T @ rows[:, :wide], delta, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("contiguous", [False, True], ids=["by head", "contiguous"])
@pytest.mark.parametrize("paths", [[OUT.format(0), OUT.format(1)], [QKV.format(0), OUT.format(0)]])
def test_an_adapter_must_have_been_trained_on_the_base(filled, checkpoints, tmp_path, paths, contiguous):
    weights = load(checkpoints[1])
    arrays = {path: weights[f"{path}.weight"] for path in map(names.to_mcore, paths)}
    if contiguous:
        # As use_contiguous_weight_layout_attention has it: all of q, then k, then v.
        joined = names.to_mcore(QKV.format(0))
        parts = [load(checkpoints[0])[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
        arrays.update({joined: np.concatenate(parts)} if joined in arrays else {})
    trained = fingerprint_from(
        {path: array.shape for path, array in arrays.items()},
        {path: sampled_elements(arrays[path]) for path in sampled_paths(arrays)},
    )
    another = {**trained, "values": "0", "float16": "0", "bfloat16": "0"}
    for name, fingerprint in (("right", trained), ("wrong", another)):
        adapter = joined_adapter(paths, fingerprint=fingerprint)
        if QKV.format(0) in paths:
            split_pairs(adapter, QKV.format(0), KV_HEADS, HEAD_DIM)
        files.write(adapter, str(tmp_path / name))
    prepare(str(tmp_path / "right"), layout_of(filled))
    with pytest.raises(BaseMismatchError, match="was trained on another base: the adapted weights have other values"):
        prepare(str(tmp_path / "wrong"), layout_of(filled))


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"compute_dtype": "bf16"}, "Set: model.model_config.compute_dtype: float32 (found bfloat16)."),
        ({"rotary_interleaved": True}, "model.model_config.rotary_interleaved: False (found True)"),
        (
            {"architectures": "Glm4ForCausalLM", "position_embedding_type": "rope"},
            "model.model_config.position_embedding_type: partial_rope (found rope)",
        ),
        # As transformers 5 writes it into config.json.
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "model.model_config.rope_theta: 500000.0 (found in rope_parameters, which is not read)",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "model.model_config.rope_scaling: null (found {'type': 'yarn'})"),
        (
            {"architectures": "DeepseekV3ForCausalLM"},
            "of which mindlora serves Qwen3ForCausalLM, Qwen3MoeForCausalLM, Qwen2ForCausalLM, Glm4ForCausalLM. ",
        ),
    ],
)
def test_what_it_cannot_compute_is_refused(keys, expected):
    with pytest.raises(ConfigError) as caught:
        network(**keys)
    assert expected in str(caught.value)
