"""The config.json that transformers, vLLM and llama.cpp need beside a model's tensors, from a MindFormers YAML."""

from typing import Any, Dict, Mapping, Sequence, Tuple

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import dtype_name
from mindlora.models.architectures.llama import LLAMA

# Key of transformers -> key of MindFormers' LlamaConfig, and what the model has if the YAML does not say.
_KEYS: Dict[str, Tuple[str, Any]] = {
    "num_attention_heads": ("num_heads", 32),
    "num_key_value_heads": ("n_kv_heads", None),
    "rms_norm_eps": ("rms_norm_eps", 1e-5),
    "rope_theta": ("theta", 10000.0),
    "max_position_embeddings": ("max_position_embedding", None),
    "bos_token_id": ("bos_token_id", 1),
    "eos_token_id": ("eos_token_id", 2),
    "pad_token_id": ("pad_token_id", 0),
}


def hugging_face_config(tensors: Sequence[Tuple[str, Any, Tuple[int, ...]]], model_config: Mapping) -> Dict[str, Any]:
    """Returns the content of config.json for a checkpoint of Llama or Qwen2, of (name, dtype, shape) of its tensors.

    Sizes that the tensors show are taken from them, and must not contradict the YAML; heads, positions and token ids
    are the YAML's. Raises CheckpointError if they disagree, or the model is another or its rotary embedding extended.
    """
    shapes = {name: shape for name, _, shape in tensors}
    embedding, gate = "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"
    extended = model_config.get("extend_method") not in (None, "None", "none")
    if model_config.get("type", "LlamaConfig") not in LLAMA.model_types or not {embedding, gate} <= shapes.keys():
        raise CheckpointError(
            f"No config.json can be made for model_config.type {model_config.get('type')}: only models of "
            f"{LLAMA.title} are described from a YAML. Copy config.json from the original model."
        )
    if extended:
        raise CheckpointError(
            f"No config.json can be made for extend_method {model_config['extend_method']}: copy config.json from the "
            "original model."
        )
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    has_bias = "model.layers.0.self_attn.q_proj.bias" in shapes
    values = {
        "vocab_size": shapes[embedding][0],
        "hidden_size": shapes[embedding][1],
        "intermediate_size": shapes[gate][0],
        "num_hidden_layers": len(layers),
    }
    _compare(values, model_config)
    kind = "Qwen2" if has_bias else "Llama"
    config: Dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        **values,
        **{theirs: model_config.get(ours, default) for theirs, (ours, default) in _KEYS.items()},
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "torch_dtype": dtype_name(next(dtype for name, dtype, _ in tensors if name == embedding)),
    }
    config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    config["max_position_embeddings"] = config["max_position_embeddings"] or model_config.get("seq_length", 2048)
    _check_heads(config, shapes)
    return config


def _compare(values: Mapping, model_config: Mapping) -> None:
    ours = {"num_hidden_layers": "num_layers"}
    for key, value in values.items():
        stated = model_config.get(ours.get(key, key))
        if stated is not None and stated != value:
            raise CheckpointError(
                f"The YAML has {ours.get(key, key)} {stated}, and the checkpoint {value}: name the YAML of this model."
            )


def _check_heads(config: Mapping, shapes: Mapping) -> None:
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    q, k = (shapes[f"model.layers.0.self_attn.{part}_proj.weight"][0] for part in "qk")
    if q * groups != k * heads:
        raise CheckpointError(
            f"The YAML has num_heads {heads} and n_kv_heads {groups}, and the checkpoint {q} rows of q and {k} of k: "
            "name the YAML of this model."
        )
