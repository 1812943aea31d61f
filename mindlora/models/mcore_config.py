"""The model_config of a MindFormers mcore model, read under each of the names that its config converters accept."""

from typing import Any, Dict, Tuple

# Hugging Face's name, which MindFormers' configurations take, then the others that its converters know.
_KEYS: Dict[str, Tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "num_layers", "n_layer"),
    "heads": ("num_attention_heads", "num_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_query_groups"),
    "head_dim": ("head_dim", "kv_channels"),
    "hidden": ("hidden_size",),
    "inner": ("intermediate_size", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "n_routed_experts", "num_moe_experts", "expert_num"),
    "expert_inner": ("moe_intermediate_size", "moe_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "shared_expert_num"),
    "shared_inner": ("moe_shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "expert_layers": ("moe_layer_freq",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "qk_head": ("qk_nope_head_dim", "qk_head_dim"),
    "rotary_head": ("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    "v_head": ("v_head_dim",),
    "mla_joined": ("mla_qkv_concat",),
    "further_layers": ("num_nextn_predict_layers", "mtp_num_layers"),
}


class ModelConfig:
    """Sizes of a model.

    Args:
        model_config (dict): The node of a MindFormers YAML.
        defaults (dict): The value of each size where the YAML says nothing, under the names of ``_KEYS``.
    """

    def __init__(self, model_config: dict, defaults: Dict[str, Any]):
        self._given, self._defaults = model_config, defaults

    def __getitem__(self, size: str) -> Any:
        """Returns a size, such as config["heads"]; a null in the YAML counts, as it does in MindFormers."""
        for key in _KEYS[size]:
            if key in self._given:
                return self._given[key]
        return self._defaults.get(size)
