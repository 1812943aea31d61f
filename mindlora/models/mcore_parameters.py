"""The sizes of all parameters of MindFormers' mcore models, which differ in their linear cells and norms alone."""

import re
from typing import Dict, Mapping, Tuple

from mindlora.common.fields import dtype_name
from mindlora.models.architecture import ParameterSize

_LAYER = re.compile(r"decoder\.layers\.\d+|mtp\.layers\.\d+\.transformer_layer")


def parameter_sizes_of(
    model_config: dict,
    linear: Mapping[str, Tuple[int, int]],
    norms: Mapping[str, int],
    norm_dtype: str = "params_dtype",
    ties: bool = True,
) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of linear cells, norms, embedding and output head.

    Args:
        model_config (dict): The node of a MindFormers YAML.
        linear (dict): Path -> (out, in) of the model's linear cells.
        norms (dict): End of a path -> size of each norm in a layer.
        norm_dtype (str): The key of ``model_config`` that holds the dtype of norms. Default: "params_dtype".
        ties (bool): Whether the model obeys tie_word_embeddings. Default: True.
    """
    dtype = dtype_of(model_config, "params_dtype")
    norm = dtype_of(model_config, norm_dtype)
    table = linear["output_layer"]
    sizes = {"embedding.word_embeddings.weight": ParameterSize(table, dtype)}
    for layer in layers_of(linear):
        sizes |= {f"{layer}.{name}.weight": ParameterSize((size,), norm) for name, size in norms.items()}
    sizes["decoder.final_layernorm.weight"] = ParameterSize(table[1:], norm)
    tied = ties and bool(model_config.get("tie_word_embeddings"))
    for path, size in linear.items():
        if path != "output_layer" or not tied:
            sizes[f"{path}.weight"] = ParameterSize(size, dtype)
    return sizes


def biases_of(model_config: dict, linear: Mapping[str, Tuple[int, int]], default: bool) -> Dict[str, ParameterSize]:
    """Returns name -> ParameterSize of the biases of linear cells.

    Args:
        model_config (dict): The node of a MindFormers YAML.
        linear (dict): Path -> (out, in) of the model's linear cells.
        default (bool): Whether q, k and v have biases where the YAML says nothing.
    """
    given = (model_config[key] for key in ("attention_bias", "add_qkv_bias") if key in model_config)
    joined, dtype = next(given, default), dtype_of(model_config, "params_dtype")
    every = model_config.get("add_bias_linear")
    return {
        f"{path}.bias": ParameterSize(size[:1], dtype)
        for path, size in linear.items()
        if path != "output_layer" and (every or joined and path.endswith("linear_qkv"))
    }


def layers_of(linear: Mapping[str, object]) -> Tuple[str, ...]:
    """Returns the paths of the layers in which there are linear cells."""
    return tuple(dict.fromkeys(found.group() for found in map(_LAYER.match, linear) if found))


def dtype_of(model_config: dict, key: str) -> str:
    """Returns a dtype of ``model_config``; float32 where it says nothing."""
    return dtype_name(model_config.get(key) or "float32", key)
