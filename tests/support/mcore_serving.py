"""Small random mcore models that are served, under Hugging Face's names, and adapters for them."""

import os

import numpy as np
import yaml

from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.llama_checkpoints import save_base

LAYERS = 2
# Three blocks in a row, so that groups of 256 cross rows; the border of gate and up is within a block.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS, EXPERT_INNER, VOCAB = 192, 4, 2, 48, 80, 3, 40, 384
ROWS = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "pad_token_id": 0,
}
ROUTED = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_INNER,
    "norm_topk_prob": True,
    "moe_router_pre_softmax": True,
}
MODELS = {
    "qwen3": {"architectures": "Qwen3ForCausalLM"},
    "qwen3-moe": {"architectures": "Qwen3MoeForCausalLM", **ROUTED},
    "qwen2": {"architectures": "Qwen2ForCausalLM", "add_qkv_bias": True},
    "glm4": {"architectures": "Glm4ForCausalLM", "attention_bias": True, "position_embedding_type": "partial_rope"},
}
# [in, out] of the cells that adapters are for; those of experts have an axis of experts before.
CELLS = {
    "attention.wq": (HIDDEN, ROWS["q_proj"]),
    "attention.wk": (HIDDEN, ROWS["k_proj"]),
    "attention.wv": (HIDDEN, ROWS["v_proj"]),
    "attention.w_qkv": (HIDDEN, sum(ROWS.values())),
    "attention.wo": (HEADS * HEAD_DIM, HIDDEN),
    "feed_forward.w_gate_up": (HIDDEN, 2 * INNER),
    "feed_forward.w2": (INNER, HIDDEN),
    "mlp.experts.weight1": (HIDDEN, 2 * EXPERT_INNER),
    "mlp.experts.weight2": (EXPERT_INNER, HIDDEN),
}
ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
FEED_FORWARD = {
    "qwen3": ("feed_forward.w2",),
    "qwen3-moe": ("mlp.experts.weight1", "mlp.experts.weight2"),
    "glm4": ("feed_forward.w_gate_up", "feed_forward.w2"),
}

# Adapter -> its path, in the folders that write_folder and write_adapters fill.
ADAPTERS = {"apart": "apart", "joined": "joined.safetensors"}
# In one batch they are for the graph of many tokens, and those of an answer for that of few; one repeats itself.
PROMPTS = (tuple(range(3, 9)), tuple(range(40, 80)), (5, 6, 7) * 6)


def node(kind, **keys):
    return {"model_config": {**COMMON, **MODELS[kind], **keys}}


def checkpoint(kind, seed=0, layers=LAYERS):
    """Returns a model's tensors under Hugging Face's names."""
    rng, tensors = np.random.default_rng(seed), {}

    def matrix(name, rows, columns, *stack):
        tensors[name] = rng.normal(0, columns**-0.5, (*stack, rows, columns)).astype(np.float32)

    def norms(*names, size=HIDDEN):
        tensors.update({f"{name}.weight": 1 + rng.normal(0, 0.1, size).astype(np.float32) for name in names})

    tensors["model.embed_tokens.weight"] = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    matrix("lm_head.weight", VOCAB, HIDDEN // 9)
    tensors["lm_head.weight"] = np.tile(tensors["lm_head.weight"], 10)[:, :HIDDEN]
    norms("model.norm")
    for layer in range(layers):
        start = f"model.layers.{layer}."
        for part, rows in ROWS.items():
            matrix(f"{start}self_attn.{part}.weight", rows, HIDDEN)
            if kind in ("qwen2", "glm4"):
                tensors[f"{start}self_attn.{part}.bias"] = rng.normal(0, 0.3, rows).astype(np.float32)
        matrix(f"{start}self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM)
        norms(f"{start}input_layernorm", f"{start}post_attention_layernorm")
        if kind.startswith("qwen3"):
            norms(f"{start}self_attn.q_norm", f"{start}self_attn.k_norm", size=HEAD_DIM)
        if kind == "qwen3-moe":
            matrix(f"{start}mlp.gate.weight", EXPERTS, HIDDEN)
            matrix(f"{start}mlp.experts.gate_up_proj", 2 * EXPERT_INNER, HIDDEN, EXPERTS)
            matrix(f"{start}mlp.experts.down_proj", HIDDEN, EXPERT_INNER, EXPERTS)
            continue
        matrix(f"{start}mlp.down_proj.weight", HIDDEN, INNER)
        if kind == "glm4":
            matrix(f"{start}mlp.gate_up_proj.weight", 2 * INNER, HIDDEN)
            norms(f"{start}post_self_attn_layernorm", f"{start}post_mlp_layernorm")
        else:
            matrix(f"{start}mlp.gate_proj.weight", INNER, HIDDEN)
            matrix(f"{start}mlp.up_proj.weight", INNER, HIDDEN)
    return tensors


def adapter(seed, ranks, layers=range(LAYERS), **fields):
    """Returns an adapter that changes answers: ranks by cell (CELLS)."""
    rng, made = np.random.default_rng(seed), Adapter({}, **fields)
    for layer in layers:
        for cell, rank in ranks.items():
            path, (wide, high) = f"model.layers.{layer}.{cell}", CELLS[cell]
            stack = (EXPERTS,) if "experts" in cell else ()
            made.tensors[path, "A"] = rng.normal(0, wide**-0.5, (*stack, rank, wide)).astype(np.float32)
            made.tensors[path, "B"] = rng.normal(0, rank**-0.5, (*stack, high, rank)).astype(np.float32)
            made.alphas[path] = 2.0 * rank
    return made


def write_adapters(folder, kind, layers=LAYERS):
    """Writes the ADAPTERS: one on Hugging Face's cells, and one on mcore's joined ones."""
    cells = {
        "apart": ("attention.wq", "attention.wv", *FEED_FORWARD[kind]),
        "joined": ("attention.w_qkv", "attention.wo"),
    }
    for seed, (name, path) in enumerate(ADAPTERS.items()):
        form = "peft" if name == "apart" else "mcore"
        files.write(adapter(seed, dict.fromkeys(cells[name], 4), range(layers)), os.path.join(folder, path), form)


def write_folder(folder, kind, layers=LAYERS):
    """Writes run.yaml, a base with a tokenizer and ADAPTERS into a folder that is made; returns it."""
    base = save_base(
        os.path.join(folder, "base"), checkpoint(kind, layers=layers), **{**COMMON, "num_hidden_layers": layers}
    )
    chat_tokenizer(CHATML).save_pretrained(base)
    config = {
        "use_legacy": False,
        "use_parallel": False,
        "run_mode": "predict",
        "load_checkpoint": base,
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": kind},
        "context": {"mode": 0, "device_target": "CPU", "max_device_memory": "4GB"},
        "model": node(kind, num_hidden_layers=layers),
    }
    with open(os.path.join(folder, "run.yaml"), "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    write_adapters(folder, kind, layers)
    return folder
