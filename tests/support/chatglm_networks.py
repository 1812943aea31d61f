"""A small ChatGLM of MindFormers'."""

# A YAML's model_config; sizes that differ from each other wherever the model lets them.
CHATGLM = {
    "num_layers": 1,
    "padded_vocab_size": 64,
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "kv_channels": 8,
    "num_attention_heads": 4,
    "multi_query_group_num": 2,
    "seq_length": 16,
    "param_init_type": "float32",
    "compute_dtype": "float32",
}


def chatglm(**keys):
    """Returns a ChatGLM of the sizes in CHATGLM."""
    from mindformers.models.glm2.glm2 import ChatGLM2ForConditionalGeneration
    from mindformers.models.glm2.glm2_config import ChatGLM2Config

    return ChatGLM2ForConditionalGeneration(ChatGLM2Config(**{**CHATGLM, **keys}))
