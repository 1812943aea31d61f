"""Small models in integers that can be held in their own bits, and what they decode to: rows of whole blocks of 64."""

import os

import numpy as np

from tests.support.cpu_llama import ON_CPU
from tests.support.llama_checkpoints import save_base
from tests.support.quantized_checkpoints import awq, compressed, eight_bits, gptq, in_int8, modelslim, save_quantized

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, LAYERS, VOCAB = 4, 2, 16, 64, 128, 2, 384
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "torch_dtype": "float32",
    "pad_token_id": 0,
    "eos_token_id": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    # With biases of q, k and v.
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}


def _settings(method, **fields):
    return {"quant_method": method, **fields}


def _compressed(format_, **of_weights):
    groups = {"group_0": {"targets": ["Linear"], "weights": of_weights}}
    return _settings("compressed-tensors", format=format_, config_groups=groups)


# name -> (the function that makes a weight, what it takes, quantization_config, quantization of the cells).
FORMS = {
    "gptq": (gptq, {"group": 32}, _settings("gptq", bits=4, group_size=32), "int4"),
    "gptq-order": (gptq, {"group": 32, "in_turn": False}, _settings("gptq", bits=4, group_size=32), "int4"),
    "gptq-8": (gptq, {"group": 32, "bits": 8}, _settings("gptq", bits=8, group_size=32), "int8"),
    "gptq-2": (gptq, {"group": 32, "bits": 2}, _settings("gptq", bits=2, group_size=32), ""),
    "gptq-16": (gptq, {"group": 16}, _settings("gptq", bits=4, group_size=16), ""),
    "awq": (awq, {"group": 64}, _settings("awq", bits=4, group_size=64, version="gemm"), "int4"),
    "packed": (
        compressed,
        {"zeros": False, "groups": 1},
        _compressed("pack-quantized", num_bits=4, strategy="channel"),
        "int4",
    ),
    "packed-groups": (
        compressed,
        {"zeros": False, "groups": 2},
        _compressed("pack-quantized", num_bits=4, strategy="group"),
        "int4",
    ),
    "w8a8": (in_int8, {"zeros": False}, _compressed("int-quantized", num_bits=8), "int8"),
    "w8a8-zeros": (in_int8, {}, _compressed("int-quantized", num_bits=8, symmetric=False), "int8"),
    "int8": (eight_bits, {}, _settings("bitsandbytes"), "int8"),
    "modelslim": (modelslim, {}, None, "int8"),
}
HELD = tuple(form for form, (*_, quantization) in FORMS.items() if quantization and form != "gptq-order")


def tensors_of(kind, form, seed=0, other=None, layers=LAYERS):
    """Returns a model's tensors in a form, and in float; ``other`` is cell -> another form of it, None for float."""
    rng, stored = np.random.default_rng(seed), {}

    def norms(*names, size=HIDDEN):
        stored.update({f"{name}.weight": 1 + rng.normal(0, 0.1, size).astype("f4") for name in names})

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = rng.normal(0, 0.2, (VOCAB, HIDDEN)).astype("f4")
    norms("model.norm")
    for layer in range(layers):
        start = f"model.layers.{layer}."
        norms(f"{start}input_layernorm", f"{start}post_attention_layernorm")
        if kind == "qwen3":
            norms(f"{start}self_attn.q_norm", f"{start}self_attn.k_norm", size=HEAD_DIM)
        if kind == "qwen2":
            biases = {cell: SHAPES[f"self_attn.{cell}"][0] for cell in ("q_proj", "k_proj", "v_proj")}
            stored.update(
                {f"{start}self_attn.{cell}.bias": rng.normal(0, 0.5, n).astype("f4") for cell, n in biases.items()}
            )
    decoded = dict(stored)
    for layer in range(layers):
        for cell, shape in SHAPES.items():
            path = f"model.layers.{layer}.{cell}"
            of_cell = (other or {}).get(cell, form)
            if of_cell is None:
                made = {f"{path}.weight": rng.normal(0, 0.2, shape).astype("f4")}
                weight = made[f"{path}.weight"]
            else:
                make, options, *_ = FORMS[of_cell]
                made, weight = make(path, shape, rng, **options)
            stored.update(made)
            decoded[f"{path}.weight"] = weight
    return stored, decoded


def save_bases(folder, kind, form, layers=LAYERS, **options):
    """Writes a model in a form, and the decoded one in float32; returns the paths and the decoded weights."""
    stored, decoded = tensors_of(kind, form, layers=layers, **options)
    config = {**CONFIG, **MODELS[kind], "num_hidden_layers": layers}
    settings = FORMS[form][2]
    held = save_quantized(os.path.join(folder, form), form, stored, settings=settings, **config)
    return held, save_base(os.path.join(folder, "decoded"), decoded, **config), decoded


def node(kind, **keys):
    """Returns the node ``model`` of a YAML for one of the models."""
    if kind == "qwen3":
        names = {**{key: CONFIG[key] for key in CONFIG if key not in ("torch_dtype", "hidden_act")}}
        return {"model_config": {**names, "architectures": "Qwen3ForCausalLM", **keys}}
    config = {
        "type": "LlamaConfig",
        "batch_size": 1,
        "seq_length": 64,
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "intermediate_size": FFN,
        "pad_token_id": 0,
        "qkv_has_bias": kind == "qwen2",
        **ON_CPU,
        **keys,
    }
    return {"model_config": config, "arch": {"type": "LlamaForCausalLM"}}
