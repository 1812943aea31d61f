"""Small networks with routed experts: MindFormers' Qwen3-MoE and DeepSeek-V3, and their experts alone; dense NumPy."""

import importlib

import numpy as np

from tests.support.mcore_networks import TINY, filled, for_a_cpu, mcore_context
from tests.support.moe_cells import Decoder

HIDDEN, INNER, EXPERTS, CHOSEN = 8, 6, 4, 2
# A YAML's model_config, besides TINY.
QWEN3_MOE = {
    **TINY,
    "num_hidden_layers": 1,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_topk_scaling_factor": 1.0,
}
DEEPSEEK_V3 = {
    **{key: value for key, value in TINY.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "moe_intermediate_size": 24,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_nextn_predict_layers": 0,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}
_ALONE = {
    "num_attention_heads": 2,
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "moe_ffn_hidden_size": INNER,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": CHOSEN,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "seq_length": 5,
    "compute_dtype": "float32",
    "params_dtype": "float32",
}
_MODELS = {
    "qwen3_moe": ("qwen3_moe", "qwen3_moe", "Qwen3MoeConfig", "TrainingQwen3MoeForCausalLM", QWEN3_MOE),
    "deepseek_v3": ("deepseek3", "deepseek_v3", "DeepseekV3Config", "TrainingDeepseekV3ForCausalLM", DEEPSEEK_V3),
}


def tiny_moe(name, seed=0, **keys):
    """Returns "qwen3_moe" or "deepseek_v3" as MindFormers trains it, with random weights."""
    folder, module, config, network, sizes = _MODELS[name]
    package = f"mindformers.models.{folder}"
    config = getattr(importlib.import_module(f"{package}.configuration_{module}"), config)
    network = getattr(importlib.import_module(f"{package}.modeling_{module}_train"), network)
    with mcore_context():
        return filled(for_a_cpu(network(config(**{**sizes, **keys}))), seed)


def experts_alone(seed=0, **keys):
    """Returns a network of one layer's experts, MindFormers' FFNGroupedGEMM, with random weights."""
    from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
    from mindformers.parallel_core.transformer_config import TransformerConfig

    return filled(for_a_cpu(Decoder(FFNGroupedGEMM(TransformerConfig(**{**_ALONE, **keys})))), seed)


def routed(tokens=5, seed=0):
    """Returns tokens [1, tokens, HIDDEN], and for each its experts' weights and numbers [1, tokens, CHOSEN]."""
    rng = np.random.default_rng(seed)
    x, probs = rng.normal(size=(1, tokens, HIDDEN)), rng.random((1, tokens, CHOSEN))
    experts = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(tokens)])[None]
    return x.astype(np.float32), probs.astype(np.float32), experts.astype(np.int32)


def changed_weight(weight, a, b, scale):
    """Returns W [experts, in, out] of a stacked weight [experts * in, out], with scale A_e^T B_e^T, in float64."""
    weight = np.asarray(weight, np.float64).reshape(len(a), a.shape[2], b.shape[1])
    return weight + scale * np.einsum("eri,eor->eio", np.asarray(a, np.float64), np.asarray(b, np.float64))


def dense_experts(x, probs, experts, weight1, weight2):
    """The oracle: sum over the experts e of a token of p_e (silu(gate) up) W2_e, where [gate, up] = x W1_e."""
    y = np.zeros(x.shape)
    for token in np.ndindex(*experts.shape[:2]):
        for prob, expert in zip(probs[token], experts[token]):
            gate, up = np.split(x[token] @ weight1[expert], 2)
            y[token] += prob * ((gate / (1 + np.exp(-gate)) * up) @ weight2[expert])
    return y
