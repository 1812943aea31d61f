"""A small Llama under Hugging Face's names, written and read back, for the tests of base checkpoints."""

import json
import os

import numpy as np

from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.base.reader import INDEX, BaseCheckpoint

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 2, 8, 32, 48, 64
ROWS = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
# The config.json of such a model, but for the vocabulary.
HUGGING_FACE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "eos_token_id": None,
    **CONFIG,
}


def llama(dtype=BFLOAT16, tied=False, biases=False):
    """Returns a Hugging Face Llama's parameters, or a Qwen2's with ``biases``."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(2):
        start = f"model.layers.{layer}."
        shapes.update({f"{start}self_attn.{part}.weight": (rows, HIDDEN) for part, rows in ROWS.items()})
        if biases:
            shapes.update({f"{start}self_attn.{part}.bias": (rows,) for part, rows in ROWS.items()})
        shapes.update(
            {
                f"{start}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
                f"{start}mlp.gate_proj.weight": (FFN, HIDDEN),
                f"{start}mlp.up_proj.weight": (FFN, HIDDEN),
                f"{start}mlp.down_proj.weight": (HIDDEN, FFN),
            }
        )
        shapes.update({f"{start}{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")})
    return {name: from_float32(rng.normal(size=shape).astype(np.float32), dtype) for name, shape in shapes.items()}


def save_base(folder, tensors, shards=1, **config):
    """Writes a folder like Hugging Face's, with a config.json if one is given; returns its path."""
    os.makedirs(folder)
    keys, weight_map = sorted(tensors), {}
    for number in range(shards):
        file = f"model-{number}.safetensors"
        write_arrays(os.path.join(folder, file), {key: tensors[key] for key in keys[number::shards]}, {"format": "pt"})
        weight_map.update(dict.fromkeys(keys[number::shards], file))
    if shards > 1:
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as file:
            json.dump({"weight_map": weight_map}, file)
    if config:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
    return str(folder)


def load(path):
    """Returns the arrays of a checkpoint, by name."""
    with BaseCheckpoint(path) as base:
        return {name: base.read_rows(name, 0, (info.shape or (1,))[0]) for name, info in base.tensors.items()}


def assert_same(actual, expected):
    """Asserts the same names, dtypes, shapes and bytes."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert actual[name].tobytes() == array.tobytes(), name
