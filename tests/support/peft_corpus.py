"""Forms of PEFT's adapter folders as they are found in public, made up: same fields and shapes, nobody's values.

Each is an adapter for a Llama of two layers (hidden 32, inner 48, vocabulary 64, 4 heads). FORMS gives for each what
differs from a plain one, and what becomes of it.
"""

import json
import os
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import numpy as np

from mindlora.core.formats.safetensors_file import write_arrays

HIDDEN, INNER, VOCABULARY = 32, 48, 64
PREFIX = "base_model.model."
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj)))"
)
_INNER = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
ALL = [*ATTENTION, *(f"mlp.{name}" for name in _INNER)]
QV = [ATTENTION[0], ATTENTION[2]]
_PLAIN = {
    "base_model_name_or_path": "org/base",
    "bias": "none",
    "inference_mode": True,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "peft_type": "LORA",
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}


class Form(NamedTuple):
    """One form.

    Attributes:
        fields (dict): What its configuration has besides, or instead; a field that is ... is absent.
        modules (list of str): The adapted modules of each layer.
        extra (dict): More tensors, key without the prefix -> shape.
        rename (callable): Takes a key, returns the one in the file.
        rank (int or callable): Of A and B; or takes a path.
        reads (str): "" if convert and the like take it, or a part of the message.
        loads (str): The same of load_lora on the Llama, if it differs.
        layers (tuple of int): The adapted layers.
        stem (str): What paths of layers begin with.
    """

    fields: Dict[str, Any] = {}
    modules: List[str] = QV
    extra: Dict[str, Tuple[int, ...]] = {}
    rename: Callable[[str], str] = str
    rank: Any = 4
    reads: str = ""
    loads: str = ""
    layers: Tuple[int, ...] = (0, 1)
    stem: str = "model.layers"


def _nulls(*names: str) -> Dict[str, None]:
    return dict.fromkeys(names)


_OF_0_5 = {**_nulls("auto_mapping", "layers_pattern", "layers_to_transform", "revision"), "alpha_pattern": {}}
_OF_0_9 = {**_OF_0_5, **_nulls("megatron_config"), "megatron_core": "megatron.core", "loftq_config": {}}
_OF_0_14 = {**_OF_0_9, **_nulls("eva_config", "exclude_modules", "layer_replication"), "lora_bias": False}
_OF_0_17 = {**_OF_0_14, **_nulls("corda_config", "target_parameters", "trainable_token_indices"), "use_qalora": False}
_OF_0_18 = {**_OF_0_17, **_nulls("alora_invocation_tokens", "arrow_config"), "ensure_weight_tying": False}
_MAGNITUDES = {f"model.layers.{layer}.{name}.lora_magnitude_vector": (HIDDEN,) for layer in range(2) for name in QV}
_TABLE, _NORM = (VOCABULARY, HIDDEN), {f"model.layers.{layer}.input_layernorm.weight": (HIDDEN,) for layer in range(2)}
_HEAD, _EMBEDDING = {"lm_head.weight": _TABLE}, {"model.embed_tokens.weight": _TABLE}
_NO_PLACE = "which the network does not have"
_CHANGED = "so the adapter belongs to a base that this initializer changed"

FORMS = {
    "plain": Form(),
    "of 2023": Form({"enable_lora": None, "merge_weights": False, "fan_in_fan_out": False, "modules_to_save": None}),
    "of PEFT 0.5": Form(_OF_0_5),
    "of PEFT 0.9": Form({**_OF_0_9, "use_rslora": False}),
    "of PEFT 0.14": Form({**_OF_0_14, "use_dora": False}),
    "of PEFT 0.17": Form({**_OF_0_17, "qalora_group_size": 16}),
    "of PEFT 0.18": Form({**_OF_0_18, "peft_version": "0.18.0"}),
    "of LLaMA-Factory": Form({**_OF_0_9, "target_modules": ["up_proj", "q_proj", "gate_proj"]}, [ALL[0], *ALL[4:6]]),
    "of axolotl": Form({**_OF_0_14, "r": 4, "target_modules": [name.split(".")[1] for name in ALL]}, ALL),
    "of unsloth": Form({**_OF_0_17, "target_modules": UNSLOTH}, ALL),
    "of unsloth, with a field of its own": Form({"unsloth_fixed": True}),
    "of swift": Form({"target_modules": r"^(model)(?!.*(lm_head|output)).*(q_proj|v_proj)$"}),
    "of trl, in training": Form({"inference_mode": False}),
    "all-linear": Form({"target_modules": "all-linear"}, ALL),
    "full paths": Form({"target_modules": [f"model.layers.{layer}.{name}" for layer in range(2) for name in QV]}),
    "a regular expression": Form({"target_modules": r".*\.self_attn\.(q|v)_proj"}),
    "one layer": Form({"layers_to_transform": [1], "layers_pattern": "layers"}, layers=(1,)),
    "a layer as a number": Form({"layers_to_transform": 0}, layers=(0,)),
    "excluded": Form({"target_modules": "all-linear", "exclude_modules": ["o_proj"]}, [*ATTENTION[:3], *ALL[4:]]),
    "rslora": Form({"use_rslora": True}),
    "rank_pattern": Form({"rank_pattern": {"q_proj": 2}}, rank=lambda path: 2 if path.endswith("q_proj") else 4),
    "alpha_pattern": Form({"alpha_pattern": {r"layers\.1\.self_attn\.v_proj": 32}}),
    "patterns": Form(
        {"rank_pattern": {"v_proj": 6}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True},
        rank=lambda path: 6 if path.endswith("v_proj") else 4,
    ),
    "lora_alpha with a fraction": Form({"lora_alpha": 1.5}),
    "no dropout": Form({"lora_dropout": ...}),
    "no r": Form({"r": ...}, rank=8),
    "no lora_alpha": Form({"lora_alpha": ...}),
    "no r, of another rank": Form({"r": ...}, reads="the configuration declares rank 8 and the tensors have 4"),
    "r is null": Form({"r": None}, reads="r is None; it must be a whole number"),
    "gaussian": Form({"init_lora_weights": "gaussian"}),
    "not initialized": Form({"init_lora_weights": False}),
    "orthogonal": Form({"init_lora_weights": "orthogonal"}),
    "pissa": Form({"init_lora_weights": "pissa"}, reads=_CHANGED),
    "olora": Form({"init_lora_weights": "olora"}, reads=_CHANGED),
    "pissa_niter": Form({"init_lora_weights": "pissa_niter_16"}, reads=_CHANGED, loads=_CHANGED),
    "corda": Form({"init_lora_weights": "corda"}, reads=_CHANGED, loads=_CHANGED),
    "loftq": Form({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, reads=_CHANGED, loads=_CHANGED),
    "dora": Form({"use_dora": True}, extra=_MAGNITUDES),
    "dora of an older PEFT": Form(
        {"use_dora": True},
        extra=_MAGNITUDES,
        rename=lambda key: f"{key}.weight" if key.endswith("magnitude_vector") else key,
    ),
    "dora with an embedding": Form(
        {"use_dora": True, "target_modules": ["q_proj", "v_proj", "embed_tokens"]},
        extra={
            **_MAGNITUDES,
            "model.embed_tokens.lora_embedding_A": (4, VOCABULARY),
            "model.embed_tokens.lora_embedding_B": (HIDDEN, 4),
            "model.embed_tokens.lora_magnitude_vector": (HIDDEN,),
        },
        loads="embed",
    ),
    "an embedding": Form(
        {"target_modules": ["q_proj", "v_proj", "embed_tokens"]},
        extra={
            "model.embed_tokens.lora_embedding_A": (4, VOCABULARY),
            "model.embed_tokens.lora_embedding_B": (HIDDEN, 4),
        },
    ),
    "dora without magnitudes": Form({"use_dora": True}, reads="use_dora is True, but the adapter has no"),
    "the adapter's name in keys": Form(rename=lambda key: key.replace(".weight", ".default.weight")),
    "a saved head": Form({"modules_to_save": ["lm_head"]}, extra=_HEAD),
    "a saved embedding and head": Form({"modules_to_save": ["embed_tokens", "lm_head"]}, extra={**_HEAD, **_EMBEDDING}),
    "saved norms": Form({"modules_to_save": ["input_layernorm"]}, extra=_NORM),
    "saved tables that are not named": Form(extra={**_HEAD, **_EMBEDDING}),
    "a saved head that is not there": Form({"modules_to_save": ["lm_head"]}, reads="the file holds no tensor of it"),
    "trained tokens": Form(
        {"trainable_token_indices": [3, 7]},
        extra={"model.embed_tokens.token_adapter.trainable_tokens_delta": (2, HIDDEN)},
        reads="so rows of the embedding were trained too",
    ),
    "a classifier of sequences": Form(
        {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]},
        extra={"score.weight": (3, HIDDEN)},
        loads=_NO_PLACE,
    ),
    "a classifier of tokens": Form(
        {"task_type": "TOKEN_CLS", "modules_to_save": ["classifier", "score"]},
        extra={"classifier.weight": (3, HIDDEN), "classifier.bias": (3,)},
        loads=_NO_PLACE,
    ),
    "features": Form({"task_type": "FEATURE_EXTRACTION"}),
    "no task": Form({"task_type": None}),
    "bias without biases": Form({"bias": "lora_only"}),
    "all biases, of a base without": Form({"bias": "all"}),
    "biases": Form(
        {"bias": "all"},
        extra={"model.layers.0.self_attn.q_proj.base_layer.bias": (HIDDEN,)},
        reads="so biases of the base were trained",
        loads="so biases of the base were trained",
    ),
    "fan_in_fan_out on linear cells": Form({"fan_in_fan_out": True}),
    "of GPT-2": Form(
        {"fan_in_fan_out": True, "target_modules": ["c_attn"]}, ["attn.c_attn"], stem="transformer.h", loads="no place"
    ),
    "of T5": Form(
        {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "v"]},
        ["layer.0.SelfAttention.q"],
        stem="encoder.block",
        loads="no place",
    ),
    "of MindSpeed-LLM": Form(
        {"target_modules": ["linear_proj"]},
        ["self_attention.linear_proj"],
        rename=lambda key: key.replace(".weight", ".default.weight"),
        stem="decoder.layers",
    ),
    "lora_bias": Form({"lora_bias": True}, reads="lora_bias is True", loads="lora_bias is True"),
    "aLoRA": Form({"alora_invocation_tokens": [1]}, reads="from these tokens on", loads="at the one embedding of"),
    "repeated layers": Form({"layer_replication": [[0, 2]]}, reads="repeats layers", loads="repeats layers"),
    "QALoRA": Form({"use_qalora": True}, reads="the input is then pooled", loads="the input is then pooled"),
    "IA3": Form({"peft_type": "IA3"}, reads="peft_type is 'IA3'"),
    "LoHa": Form({"peft_type": "LOHA"}, reads="peft_type is 'LOHA'"),
}

# What load_lora and merge take, and convert cannot.
_NEED_A_BASE = ("pissa", "olora", "trained tokens")


def is_loaded(name: str) -> bool:
    """Returns whether load_lora and merge take a form."""
    form = FORMS[name]
    return not form.loads and (not form.reads or name in _NEED_A_BASE)


def tensors_of(form: Form) -> Dict[str, np.ndarray]:
    """Returns the tensors of a form under the keys of its file."""
    random, found = np.random.default_rng(1), {}
    for layer in form.layers:
        for name in form.modules:
            path = f"{form.stem}.{layer}.{name}"
            rows, columns = _INNER.get(name.rpartition(".")[2], (HIDDEN, HIDDEN))
            rank = form.rank(path) if callable(form.rank) else form.rank
            found[f"{path}.lora_A.weight"], found[f"{path}.lora_B.weight"] = (rank, columns), (rows, rank)
    found.update(form.extra)
    return {
        form.rename(PREFIX + key): (0.1 * random.normal(size=shape) + (key.endswith("vector") and 1)).astype(np.float32)
        for key, shape in found.items()
    }


def write(folder: str, form: Form) -> str:
    """Writes a form's folder; returns its path."""
    os.makedirs(folder)
    write_arrays(os.path.join(folder, "adapter_model.safetensors"), tensors_of(form), {"format": "pt"})
    fields = {name: value for name, value in {**_PLAIN, **form.fields}.items() if value is not ...}
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(fields, file)
    return str(folder)
