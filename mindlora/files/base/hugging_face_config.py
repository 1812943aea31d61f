"""The config.json that transformers, vLLM and llama.cpp need beside a model's tensors, from a MindFormers YAML."""

from typing import Any, Dict, Mapping, Sequence, Tuple

from mindlora.core.errors import CheckpointError
from mindlora.core.numerics.dtypes import dtype_name
from mindlora.core.text import listed
from mindlora.models.architectures.llama import LLAMA
from mindlora.models.architectures.mcore_sizes import decoder_sizes
from mindlora.models.architectures.qwen3 import QWEN3
from mindlora.models.architectures.qwen3_moe import QWEN3_MOE
from mindlora.models.architectures.registry import by_hugging_face_type

_EMBEDDING, _GATE = "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"
_QUERIES, _KEYS_OF_ATTENTION = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")
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
# Key of transformers -> attribute of DecoderSizes, of an mcore model.
_OF_SIZES = {
    "vocab_size": "vocabulary",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hugging_face_config(tensors: Sequence[Tuple[str, Any, Tuple[int, ...]]], model_config: Mapping) -> Dict[str, Any]:
    """Returns the content of config.json for a checkpoint of Llama, Qwen2, Qwen3 or Qwen3-MoE.

    Args:
        tensors (sequence): (name, dtype, shape) of each tensor, under Hugging Face's names.
        model_config (mapping): That of a MindFormers YAML. Sizes that the tensors show must not contradict it; heads,
            positions and token ids are its own.

    Raises CheckpointError if they disagree, or the model is another or its rotary embedding extended.
    """
    shapes = {name: shape for name, _, shape in tensors}
    kind = by_hugging_face_type(str(model_config.get("model_type")))
    is_mcore = kind in (QWEN3, QWEN3_MOE)
    if not is_mcore and (
        model_config.get("type", "LlamaConfig") not in LLAMA.model_types or not {_EMBEDDING, _GATE} <= shapes.keys()
    ):
        raise CheckpointError(
            f"No config.json can be made for model_config.type {model_config.get('type')}: only models of "
            f"{LLAMA.title}, {QWEN3.title} and {QWEN3_MOE.title} are described from a YAML. Copy config.json from the "
            "original model."
        )
    config = _of_mcore_model(kind, shapes, model_config) if is_mcore else _of_llama(shapes, model_config)
    config["hidden_act"] = "silu"
    config["tie_word_embeddings"] = "lm_head.weight" not in shapes
    config["torch_dtype"] = dtype_name(next(dtype for name, dtype, _ in tensors if name == _EMBEDDING))
    return config


def _of_llama(shapes, model_config):
    if model_config.get("extend_method") not in (None, "None", "none"):
        raise CheckpointError(
            f"No config.json can be made for extend_method {model_config['extend_method']}: copy config.json from the "
            "original model."
        )
    values = {**_shown(shapes), "intermediate_size": shapes[_GATE][0]}
    _compare(values, model_config, {"num_hidden_layers": "num_layers"})
    kind = "Qwen2" if "model.layers.0.self_attn.q_proj.bias" in shapes else "Llama"
    config: Dict[str, Any] = {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        **values,
        **{theirs: model_config.get(ours, default) for theirs, (ours, default) in _KEYS.items()},
    }
    config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    config["max_position_embeddings"] = config["max_position_embeddings"] or model_config.get("seq_length", 2048)
    _check_heads(config, shapes, "num_heads", "n_kv_heads")
    return config


def _of_mcore_model(kind, shapes, model_config):
    sizes = decoder_sizes(kind, dict(model_config))
    needed = [_EMBEDDING, _QUERIES, _KEYS_OF_ATTENTION, *([] if sizes.experts else [_GATE])]
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {listed(missing)}, and the YAML describes a {kind.title}. Name the YAML of this "
            "model (--config), or copy config.json from the original model."
        )
    config: Dict[str, Any] = {
        "architectures": [kind.model_types[0]],
        "model_type": kind.hugging_face_types[0],
        **{key: getattr(sizes, size) for key, size in _OF_SIZES.items()},
        "attention_bias": sizes.has_bias,
        "max_position_embeddings": model_config.get("max_position_embeddings") or model_config.get("seq_length", 4096),
        **{key: model_config[key] for key in _TOKENS if model_config.get(key) is not None},
    }
    if sizes.experts:
        config.update(num_experts=sizes.experts, num_experts_per_tok=sizes.chosen, norm_topk_prob=sizes.sums_to_one)
        config.update(moe_intermediate_size=sizes.inner, intermediate_size=model_config.get("intermediate_size"))
        config.update(decoder_sparse_step=1, mlp_only_layers=[])
    else:
        config["intermediate_size"] = sizes.inner
    shown = _shown(shapes) if sizes.experts else {**_shown(shapes), "intermediate_size": shapes[_GATE][0]}
    _compare(shown, config, {})
    _check_heads(config, shapes, "num_attention_heads", "num_key_value_heads")
    return config


def _shown(shapes):
    """Returns the sizes that every model's tensors show."""
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    vocabulary, hidden = shapes[_EMBEDDING]
    return {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": len(layers)}


def _compare(values, stated_by, ours):
    for key, value in values.items():
        stated = stated_by.get(ours.get(key, key))
        if stated is not None and stated != value:
            raise CheckpointError(
                f"The YAML has {ours.get(key, key)} {stated}, and the checkpoint {value}: name the YAML of this model."
            )


def _check_heads(config, shapes, heads_key, groups_key):
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    q, k = shapes[_QUERIES][0], shapes[_KEYS_OF_ATTENTION][0]
    if q * groups != k * heads or q != heads * config.get("head_dim", q // heads):
        raise CheckpointError(
            f"The YAML has {heads_key} {heads} and {groups_key} {groups}, and the checkpoint {q} rows of q and {k} of "
            "k: name the YAML of this model."
        )
