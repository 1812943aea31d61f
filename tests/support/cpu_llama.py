"""What a YAML must say of MindFormers' Llama so that it runs on a CPU."""

ON_CPU = {
    "compute_dtype": "float32",
    "layernorm_compute_type": "float32",
    "softmax_compute_type": "float32",
    "rotary_dtype": "float32",
    "param_init_type": "float32",
    "use_flash_attention": False,
    "fused_rms_norm": False,
    "use_rope_slice": True,
}
