"""The records of models against MindFormers' own networks: cells, sizes, parameters; and PEFT folders of a ChatGLM."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora import LoraConfig, apply_lora, load_lora, save_lora
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.network.registry import describe
from mindlora.network.tree import Tree, lora_cells
from mindlora.run.checks.model import described_network
from mindlora.run.yaml_run import YamlRun
from tests.support.chatglm_networks import CHATGLM, chatglm
from tests.support.mcore_networks import TINY, tiny_deepseek_v3, tiny_qwen3, tiny_qwen3_moe

MOE = {"num_experts": 4, "moe_intermediate_size": 20}
LATENT = {
    **{key: value for key, value in TINY.items() if key != "head_dim"},
    **{"num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 6, "qk_nope_head_dim": 8},
    **{
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "moe_intermediate_size": 20,
    "num_nextn_predict_layers": 0,
}
LAYERS = CHATGLM["num_layers"]
APART = {"qkv_concat": False, "mlp_concat": False}
NETWORKS = {
    "qwen3": ("Qwen3ForCausalLM", tiny_qwen3, TINY, {}),
    "qwen3 tied": ("Qwen3Config", tiny_qwen3, TINY, {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", tiny_qwen3_moe, {**TINY, **MOE}, {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", tiny_deepseek_v3, LATENT, {}),
    "deepseek_v3 apart": ("DeepseekV3Config", tiny_deepseek_v3, LATENT, {"mla_qkv_concat": False}),
    "chatglm": ("ChatGLM2ForConditionalGeneration", chatglm, CHATGLM, {}),
    "chatglm apart": ("ChatGLM2Config", chatglm, CHATGLM, APART),
}


@pytest.fixture(scope="module", params=NETWORKS, ids=list(NETWORKS))
def model(request, mindformers):
    """The record of a model, its configuration, and the shapes of a network's parameters."""
    kind, build, config, keys = NETWORKS[request.param]
    network = build(**{**config, **keys})
    shapes = {parameter.name: tuple(parameter.shape) for parameter in network.get_parameters()}
    return registry.by_model_type(kind), {**config, **keys}, shapes


def test_sizes_are_those_of_the_network_s_linear_cells(model):
    architecture, config, shapes = model
    sizes = architecture.linear_sizes(config)
    head = f"{architecture.output_head.mcore or architecture.output_head.mindformers}.weight"
    linear = {
        name: shape for name, shape in shapes.items() if len(shape) == 2 and names.is_linear(name.rpartition(".")[0])
    }
    if config.get("tie_word_embeddings"):
        linear[head] = shapes["embedding.word_embeddings.weight"]
    assert {f"{path}.weight": size for path, size in sizes.items()} == linear


def test_every_parameter_is_known_and_back_is_the_same_name(model):
    architecture, _, shapes = model
    found = names.architecture_of(shapes)
    assert found.title.partition(" with")[0] == architecture.title
    for name in shapes:
        path, _, leaf = name.rpartition(".")
        if names.is_computed(name) or leaf in ("weight1", "weight2", "key_cache", "value_cache"):
            continue
        worlds = names.worlds_of(name, found)
        hugging_face = [found.rename_parameter(name, world, "hf") for world in worlds]
        parts = found.joined_parts(path) or found.joined_path(path)
        back = {found.rename_parameter(str(own), "hf", world) for own, world in zip(hugging_face, worlds)}
        assert parts or back == {name}


@pytest.mark.parametrize("keys", [{}, APART], ids=["joined", "apart"])
def test_a_chatglm_s_adapter_is_a_peft_folder_under_hugging_face_s_names(mindformers, tmp_path, keys):
    network = chatglm(**keys)
    report = apply_lora(network, LoraConfig(target_modules="all-linear", lora_rank=2, lora_alpha=4))
    assert len(report.replaced) == LAYERS * (7 if keys else 4) and not any(
        "output_layer" in path for path in report.replaced
    )
    rng = np.random.default_rng(0)
    import mindspore as ms

    for _, cell in lora_cells(network):
        for parameter in cell.parts().values():
            parameter.set_data(ms.Tensor(rng.normal(size=parameter.shape).astype(np.float32)))
    save_lora(network, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    cells = ("self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    prefix = "base_model.model.transformer.encoder.layers."
    assert {name.partition(".lora_")[0] for name in tensors} == {
        f"{prefix}{layer}.{cell}" for layer in range(LAYERS) for cell in cells
    }
    other = chatglm(**keys)
    load_lora(other, tmp_path / "adapter", on_base_mismatch="ignore")
    x = ms.Tensor(rng.normal(size=(3, 32)).astype(np.float32))
    for (path, mine), (_, loaded) in zip(lora_cells(network), lora_cells(other)):
        if mine.in_channels == 32:
            loaded.weight.set_data(mine.weight.value())
            if mine.has_bias:
                loaded.bias.set_data(mine.bias.value())
            np.testing.assert_allclose(mine(x).asnumpy(), loaded(x).asnumpy(), rtol=1e-5, atol=1e-5, err_msg=path)


def test_a_llama_with_experts_is_described_as_mindformers_builds_it(make_llama):
    network = make_llama(moe_config={"expert_num": 4, "num_experts_chosen": 2, "routing_policy": "TopkRouterV2"})
    built = describe(Tree(network), LoraConfig(quantize_base="nf4"))
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "n_kv_heads": 2, "vocab_size": 64}
    model = {"type": "LlamaConfig", **sizes, "intermediate_size": 48, "param_init_type": "float32"}
    described = described_network(YamlRun({"model": {"model_config": model}, "moe_config": {"expert_num": 4}}))
    assert described.parameters == built.parameters
    assert {path: cell.refusal for path, cell in described.cells.items()} == {
        path: cell.refusal for path, cell in built.cells.items()
    }
    stacks = [path for path, cell in built.cells.items() if cell.refusal]
    assert len(stacks) == 6
    for path, cell in described.cells.items():
        assert path in stacks or cell.shape == built.cells[path].shape
        assert cell.quantization_refusal == built.cells[path].quantization_refusal
