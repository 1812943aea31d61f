"""Small checkpoints of models that MindFormers has in mcore, under Hugging Face's names."""

import numpy as np

from mindlora.core.numerics.dtypes import BFLOAT16, from_float32

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, EXPERTS, EXPERT_INNER, VOCAB = 4, 2, 12, 20, 28, 3, 6, 24
Q_RANK, KV_RANK, ROTARY, LATENT_HEAD = 10, 8, 4, 6
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}


def qwen3(layers=2, tied=False, experts=0, stacked=False):
    """Returns a Qwen3's parameters, or a Qwen3-MoE's with ``experts``, stacked as transformers 5 saves them."""
    shapes = _ends(tied)
    for layer in range(layers):
        start = f"model.layers.{layer}."
        rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
        shapes.update({f"{start}self_attn.{part}.weight": (count, HIDDEN) for part, count in rows.items()})
        shapes[f"{start}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes.update({f"{start}self_attn.{norm}.weight": (HEAD_DIM,) for norm in ("q_norm", "k_norm")})
        shapes.update(_routed(start, experts, stacked) if experts else _gated(f"{start}mlp", INNER))
        shapes.update(_norms(start))
    return _filled(shapes)


def deepseek_v3(layers=2, experts=EXPERTS):
    """Returns a DeepSeek-V3's parameters: layer 0 is dense, the others have routed and shared experts."""
    shapes = _ends(False)
    attention = {
        "q_a_proj": (Q_RANK, HIDDEN),
        "q_a_layernorm": (Q_RANK,),
        "q_b_proj": (HEADS * (LATENT_HEAD + ROTARY), Q_RANK),
        "kv_a_proj_with_mqa": (KV_RANK + ROTARY, HIDDEN),
        "kv_a_layernorm": (KV_RANK,),
        "kv_b_proj": (HEADS * 2 * LATENT_HEAD, KV_RANK),
        "o_proj": (HIDDEN, HEADS * LATENT_HEAD),
    }
    for layer in range(layers):
        start = f"model.layers.{layer}."
        shapes.update({f"{start}self_attn.{cell}.weight": shape for cell, shape in attention.items()})
        if layer:
            shapes.update(_routed(start, experts, False))
            shapes[f"{start}mlp.gate.e_score_correction_bias"] = (experts,)
            shapes.update(_gated(f"{start}mlp.shared_experts", EXPERT_INNER))
        else:
            shapes.update(_gated(f"{start}mlp", INNER))
        shapes.update(_norms(start))
    return _filled(shapes)


def chatglm(layers=2):
    """Returns a ChatGLM3's parameters."""
    shapes = {
        "transformer.embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        "transformer.encoder.final_layernorm.weight": (HIDDEN,),
        "transformer.output_layer.weight": (VOCAB, HIDDEN),
        "transformer.rotary_pos_emb.inv_freq": (3,),
    }
    total = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for layer in range(layers):
        start = f"transformer.encoder.layers.{layer}."
        shapes.update(
            {
                f"{start}input_layernorm.weight": (HIDDEN,),
                f"{start}self_attention.query_key_value.weight": (total, HIDDEN),
                f"{start}self_attention.query_key_value.bias": (total,),
                f"{start}self_attention.dense.weight": (HIDDEN, HEADS * HEAD_DIM),
                f"{start}post_attention_layernorm.weight": (HIDDEN,),
                f"{start}mlp.dense_h_to_4h.weight": (2 * INNER, HIDDEN),
                f"{start}mlp.dense_4h_to_h.weight": (HIDDEN, INNER),
            }
        )
    return _filled(shapes)


def _ends(tied):
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    return shapes if tied else {**shapes, "lm_head.weight": (VOCAB, HIDDEN)}


def _norms(start):
    return {f"{start}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}


def _gated(holder, inner):
    return {
        f"{holder}.gate_proj.weight": (inner, HIDDEN),
        f"{holder}.up_proj.weight": (inner, HIDDEN),
        f"{holder}.down_proj.weight": (HIDDEN, inner),
    }


def _routed(start, experts, stacked):
    shapes = {f"{start}mlp.gate.weight": (experts, HIDDEN)}
    if stacked:
        shapes[f"{start}mlp.experts.gate_up_proj"] = (experts, 2 * EXPERT_INNER, HIDDEN)
        shapes[f"{start}mlp.experts.down_proj"] = (experts, HIDDEN, EXPERT_INNER)
        return shapes
    for expert in range(experts):
        shapes.update(_gated(f"{start}mlp.experts.{expert}", EXPERT_INNER))
    return shapes


def _filled(shapes):
    rng = np.random.default_rng(0)
    return {name: from_float32(rng.normal(size=shape).astype(np.float32), BFLOAT16) for name, shape in shapes.items()}
