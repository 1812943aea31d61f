"""Base checkpoints of Qwen3, Qwen3-MoE, DeepSeek-V3 and ChatGLM, as MindFormers' converters and modules have them."""

import types

import numpy as np
import pytest

from mindlora.cli import main
from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import to_float32
from mindlora.core.numerics.nf4 import TENSOR_NAMES, quantize, tensor_name
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.files import write
from mindlora.files.base.convert import convert_base
from mindlora.files.base.merge import merge_checkpoint
from mindlora.files.base.quantize import check_quantized_base, quantize_checkpoint
from tests.support.llama_checkpoints import assert_same, llama, load, save_base
from tests.support.mcore_checkpoints import (
    CONFIG,
    EXPERT_INNER,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    Q_RANK,
    chatglm,
    deepseek_v3,
    qwen3,
)


@pytest.fixture
def converted(tmp_path):
    """Returns a function that converts tensors for MindFormers and returns the result."""

    def convert(tensors, to="mindformers", shards=2, config=CONFIG):
        source = save_base(tmp_path / "hf", tensors, shards, **config)
        convert_base(source, str(tmp_path / "mf"), None, to)
        return load(tmp_path / "mf")

    return convert


def by_mindformers(mindformers, monkeypatch, tensors, experts):
    """Returns what MindFormers' own model makes of Hugging Face's tensors."""
    from mindformers.parallel_core.utils import model_mixin

    if experts:
        from mindformers.models.qwen3_moe.modeling_qwen3_moe_train import TrainingQwen3MoeForCausalLM as Model
    else:
        from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM as Model
    monkeypatch.setattr(model_mixin, "is_legacy_model", lambda: False)
    config = types.SimpleNamespace(
        use_contiguous_weight_layout_attention=False,
        use_interleaved_weight_layout_mlp=True,
        kv_channels=HEAD_DIM,
        num_query_groups=KV_HEADS,
        num_attention_heads=HEADS,
        ffn_hidden_size=INNER,
        hidden_size=HIDDEN,
        moe_ffn_hidden_size=EXPERT_INNER,
        num_layers=2,
        num_moe_experts=experts,
    )
    judge = type(
        "Judge", (model_mixin.TrainModelMixin, model_mixin.ModelMixin), {"weight_mapping": Model.weight_mapping}
    )()
    judge.transformer_config = config
    judge.get_gpt_transformer_config = lambda: config
    return Model.convert_weight_dict(judge, dict(tensors))


@pytest.mark.parametrize("experts", [0, EXPERTS])
def test_qwen3_is_what_mindformers_own_converter_makes_of_it(mindformers, monkeypatch, converted, experts):
    tensors = qwen3(experts=experts)
    assert_same(converted(tensors), by_mindformers(mindformers, monkeypatch, tensors, experts))


@pytest.mark.parametrize(
    "tensors, config",
    [
        (qwen3(), CONFIG),
        (qwen3(tied=True), {**CONFIG, "tie_word_embeddings": True}),
        (qwen3(experts=EXPERTS), CONFIG),
        (deepseek_v3(), {}),
        (chatglm(), {}),
    ],
    ids=["qwen3", "qwen3 tied", "qwen3_moe", "deepseek_v3", "chatglm"],
)
@pytest.mark.parametrize("name", ["mf", "mf.safetensors", "mf.ckpt"])
def test_there_and_back(tmp_path, tensors, config, name):
    source = save_base(tmp_path / "hf", tensors, 2, **config)
    there = convert_base(source, str(tmp_path / name), None, "mindformers")
    assert there.to == ("mindformers" if "transformer.output_layer.weight" in tensors else "mcore")
    heads = {"heads": HEADS, "kv_heads": KV_HEADS}
    convert_base(str(tmp_path / name), str(tmp_path / "back"), "mindformers", "hf", **heads)
    kept = {name: array for name, array in tensors.items() if not name.endswith("inv_freq")}
    assert_same(load(tmp_path / "back"), kept)


def test_experts_that_transformers_5_stacked_are_the_same(tmp_path, converted):
    assert_same(converted(_with_stacked_values()), _load_converted(tmp_path, qwen3(experts=EXPERTS)))


def _with_stacked_values():
    apart, stacked = qwen3(experts=EXPERTS), qwen3(experts=EXPERTS, stacked=True)
    for layer in range(2):
        holder = f"model.layers.{layer}.mlp.experts"

        def every(part, holder=holder):
            return np.stack([apart[f"{holder}.{expert}.{part}.weight"] for expert in range(EXPERTS)])

        stacked[f"{holder}.gate_up_proj"] = np.concatenate([every("gate_proj"), every("up_proj")], axis=1)
        stacked[f"{holder}.down_proj"] = every("down_proj")
    return {name: array if ".experts." in name else apart[name] for name, array in stacked.items()}


def _load_converted(tmp_path, tensors):
    convert_base(save_base(tmp_path / "apart", tensors, **CONFIG), str(tmp_path / "apart_mf"), "hf", "mcore")
    return load(tmp_path / "apart_mf")


def test_deepseek_s_names_and_rows_are_those_of_its_modules(converted):
    tensors, found = deepseek_v3(), converted(deepseek_v3(), config={})
    attention = ["linear_qkv", "linear_qb", "linear_kvb", "linear_proj", "q_layernorm", "k_layernorm"]
    own = {f"decoder.layers.{layer}.self_attention.{cell}.weight" for layer in (0, 1) for cell in attention}
    own |= {
        f"decoder.layers.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("input_layernorm", "pre_mlp_layernorm")
    }
    own |= {f"decoder.layers.0.mlp.{cell}.weight" for cell in ("linear_fc1", "linear_fc2")}
    own |= {f"decoder.layers.1.mlp.shared_experts.{cell}.weight" for cell in ("linear_fc1", "linear_fc2")}
    own |= {f"decoder.layers.1.mlp.{name}" for name in ("router.weight", "router.expert_bias")}
    own |= {f"decoder.layers.1.mlp.experts.{name}" for name in ("weight1", "weight2")}
    own |= {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    assert set(found) == own
    start = "model.layers.1."
    # MLASelfAttentionConcatenated splits its output into q_rank rows, then those of the latent and the position.
    down = found["decoder.layers.1.self_attention.linear_qkv.weight"]
    np.testing.assert_array_equal(down[:Q_RANK], tensors[start + "self_attn.q_a_proj.weight"])
    np.testing.assert_array_equal(down[Q_RANK:], tensors[start + "self_attn.kv_a_proj_with_mqa.weight"])
    # SharedExpertMLPInterleaved: (inner, 2).
    shared = found["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"]
    np.testing.assert_array_equal(shared[::2], tensors[start + "mlp.shared_experts.gate_proj.weight"])
    np.testing.assert_array_equal(shared[1::2], tensors[start + "mlp.shared_experts.up_proj.weight"])


def test_chatglm_keeps_hugging_face_s_joined_cells(converted):
    tensors, found = chatglm(), converted(chatglm(), config={})
    table = tensors.pop("transformer.embedding.word_embeddings.weight")
    del tensors["transformer.rotary_pos_emb.inv_freq"]
    assert_same(found, {**tensors, "transformer.embedding.embedding_weight": table})


def test_a_chatglm_without_joined_cells_is_joined_for_hugging_face(tmp_path):
    whole, apart = chatglm(), {}
    for name, array in whole.items():
        if "query_key_value" in name:
            rows = np.split(array, [HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM])
            apart.update({name.replace("query_key_value", part): own for part, own in zip(("wq", "wk", "wv"), rows)})
        elif "dense_h_to_4h" in name:
            rows = np.split(array, 2)
            apart.update({name.replace("dense_h_to_4h", f"dense_{s}"): own for s, own in zip(("left", "right"), rows)})
        else:
            apart[name.replace("word_embeddings.weight", "embedding_weight")] = array
    del apart["transformer.rotary_pos_emb.inv_freq"], whole["transformer.rotary_pos_emb.inv_freq"]
    convert_base(save_base(tmp_path / "mf", apart), str(tmp_path / "hf"), "mindformers", "hf")
    assert_same(load(tmp_path / "hf"), whole)


def test_a_llama_in_mcore_and_back(tmp_path):
    tensors = llama(biases=True)
    source = save_base(tmp_path / "hf", tensors, num_attention_heads=4, num_key_value_heads=2)
    convert_base(source, str(tmp_path / "mcore"), "hf", "mcore")
    found = load(tmp_path / "mcore")
    assert "decoder.layers.1.self_attention.linear_qkv.bias" in found and "output_layer.weight" in found
    convert_base(str(tmp_path / "mcore"), str(tmp_path / "back"), "mcore", "hf", heads=4, kv_heads=2)
    assert_same(load(tmp_path / "back"), tensors)


def test_what_is_missing_or_wrong_is_named(tmp_path):
    lacking = qwen3(experts=EXPERTS)
    del lacking["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match="lacks model.layers.1.mlp.experts.2.up_proj.weight"):
        convert_base(save_base(tmp_path / "a", lacking, **CONFIG), str(tmp_path / "out"), None, "mcore")
    with pytest.raises(CheckpointError, match="the number of heads is not known"):
        convert_base(save_base(tmp_path / "b", qwen3()), str(tmp_path / "out"), None, "mcore")
    del lacking["model.layers.0.self_attn.k_proj.weight"]
    with pytest.raises(CheckpointError, match="nothing for model.layers.0.attention.wk.weight"):
        convert_base(
            save_base(tmp_path / "c", {k: v for k, v in qwen3().items() if "0.self_attn.k_proj" not in k}, **CONFIG),
            str(tmp_path / "out"),
            None,
            "mcore",
        )


@pytest.mark.parametrize("cells", [("wq", "wv"), ("wq", "wk", "wv", "wo")])
def test_an_adapter_is_merged_into_an_mcore_base_as_into_hugging_face_s(tmp_path, cells):
    rng, adapter = np.random.default_rng(0), Adapter({})
    sizes = {"wq": (48, HIDDEN), "wk": (24, HIDDEN), "wv": (24, HIDDEN), "wo": (HIDDEN, 48)}
    for cell in cells:
        path = f"model.layers.1.attention.{cell}"
        adapter.tensors[path, "A"] = rng.normal(size=(2, sizes[cell][1])).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(sizes[cell][0], 2)).astype(np.float32)
        adapter.alphas[path] = 2.0
    write(adapter, str(tmp_path / "adapter"))
    source = save_base(tmp_path / "hf", qwen3(), **CONFIG)
    convert_base(source, str(tmp_path / "mcore"), None, "mcore")
    merge_checkpoint(source, str(tmp_path / "adapter"), str(tmp_path / "hf_merged"))
    merge_checkpoint(str(tmp_path / "mcore"), str(tmp_path / "adapter"), str(tmp_path / "merged"), kv_heads=KV_HEADS)
    convert_base(str(tmp_path / "merged"), str(tmp_path / "back"), None, "hf", heads=HEADS, kv_heads=KV_HEADS)
    assert_same(load(tmp_path / "back"), load(tmp_path / "hf_merged"))


def test_latents_are_merged_into_the_cell_that_joins_them(tmp_path):
    rng, adapter = np.random.default_rng(0), Adapter({})
    for cell, rows in (("wq_down", Q_RANK), ("wkv_down", 12)):
        path = f"model.layers.1.attention.{cell}"
        adapter.tensors[path, "A"] = rng.normal(size=(2, HIDDEN)).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(rows, 2)).astype(np.float32)
        adapter.alphas[path] = 2.0
    write(adapter, str(tmp_path / "adapter"))
    convert_base(save_base(tmp_path / "hf", deepseek_v3()), str(tmp_path / "mcore"), None, "mcore")
    merge_checkpoint(str(tmp_path / "mcore"), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    change = to_float32(load(tmp_path / "merged")[name]) - to_float32(load(tmp_path / "mcore")[name])
    wanted = np.concatenate([adapter.delta(f"model.layers.1.attention.{cell}") for cell in ("wq_down", "wkv_down")])
    np.testing.assert_allclose(change, wanted, atol=0.05)


@pytest.mark.parametrize("to", ["hf", "mcore"])
def test_a_quantized_base_has_mcore_names(tmp_path, to):
    source = save_base(tmp_path / "hf", qwen3(experts=EXPERTS), **CONFIG)
    if to == "mcore":
        convert_base(source, str(tmp_path / "mcore"), None, to)
        source = str(tmp_path / "mcore")
    quantize_checkpoint(source, str(tmp_path / "nf4.safetensors"))
    found = load_any(tmp_path / "nf4.safetensors")
    four_bit = {name for name, array in found.items() if array.dtype == np.uint8 and not name.endswith("_absmax")}
    weights = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")
    weights += ("mlp.experts.weight1", "mlp.experts.weight2")
    assert four_bit == {f"decoder.layers.{layer}.{weight}" for layer in (0, 1) for weight in weights}
    assert found["decoder.layers.0.mlp.router.weight"].shape == (EXPERTS, HIDDEN)


def test_stacked_experts_are_quantized_as_one_matrix_and_the_run_must_exclude_the_same(tmp_path):
    source, output = save_base(tmp_path / "hf", qwen3(experts=EXPERTS), **CONFIG), str(tmp_path / "nf4.safetensors")
    convert_base(source, str(tmp_path / "mcore"), None, "mcore")
    stacked = load(tmp_path / "mcore")
    quantize_checkpoint(source, output, exclude=["experts.down_proj"])
    found = load_any(tmp_path / "nf4.safetensors")
    for layer in (0, 1):
        name = f"decoder.layers.{layer}.mlp.experts.weight1"
        packed = quantize(to_float32(stacked[name]))
        for field in TENSOR_NAMES:
            np.testing.assert_array_equal(found[tensor_name(name, field)], getattr(packed, field), strict=True)
        name = f"decoder.layers.{layer}.mlp.experts.weight2"
        np.testing.assert_array_equal(found[name], stacked[name], strict=True)
    check_quantized_base(output, ["mlp.experts.weight2"])
    with pytest.raises(CheckpointError, match=r"differ at decoder.layers.\{0..1\}.mlp.experts.weight2"):
        check_quantized_base(output, None)


def test_the_command_knows_mcore(tmp_path):
    source = save_base(tmp_path / "hf", qwen3(), **CONFIG)
    assert main(["base", "convert", source, str(tmp_path / "mf"), "--to", "mcore"]) == 0
    words = ["--from", "mcore", "--to", "hf", "--config", str(tmp_path / "hf")]
    assert main(["base", "convert", str(tmp_path / "mf"), str(tmp_path / "b"), *words]) == 0
    assert_same(load(tmp_path / "b"), qwen3())


def load_any(path):
    from mindlora.core.formats.safetensors_file import TensorFile

    with TensorFile(path) as file:
        return {key: file.read(key) for key in file.tensors}
