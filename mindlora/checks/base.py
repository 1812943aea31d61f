"""Is load_checkpoint the base of the model that the YAML describes? MindFormers leaves random what it does not find."""

import os
import re
from typing import Any, Dict, Iterator, Mapping, Optional, Tuple

from mindlora.base import quantize
from mindlora.checks.mcore import is_mcore
from mindlora.common.git_lfs import refuse_pointer
from mindlora.common.text import examples
from mindlora.common.yaml_file import value_at
from mindlora.errors import ConfigError
from mindlora.formats import ckpt_file
from mindlora.formats.safetensors_file import TensorFile
from mindlora.models import registry


def base_mistakes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields how the linear weights of load_checkpoint differ from the model's: layers and shapes.

    Args:
        config (mapping): The whole YAML. Of a folder, only whose names it has is looked at. Nothing is
            said of a quantized base, a model whose cells are not known, or a run in parallel, whose checkpoint may be
            divided.
    """
    path, wanted = config.get("load_checkpoint"), _linear_shapes(config)
    file = (
        _file_of(path, config.get("load_ckpt_format")) if path and wanted and not config.get("use_parallel") else None
    )
    if file is None:
        return
    refuse_pointer(file, ConfigError)
    found = _stored_shapes(file)
    if any(".self_attn." in name for name in found):
        # MindFormers converts a folder of them itself, if it is told to read it.
        if file == path or config.get("load_ckpt_format") != "safetensors":
            yield (
                f"load_checkpoint: {path} has Hugging Face's names. Name its folder, with load_ckpt_format: "
                f"safetensors, or convert it: mindlora convert-base {path} base.safetensors --to mindformers"
            )
        return
    # Of a quantized base check_quantized_base says what to do.
    if file != path or quantize.quantized_paths(found):
        return
    missing = [name for name in wanted if name not in found]
    kinds = {_kind(name) for name in wanted}
    left = [name for name in found if _kind(name) in kinds and name not in wanted]
    other = [name for name in wanted if name in found and tuple(found[name]) != wanted[name]]
    if missing:
        yield (
            f"load_checkpoint: {path} lacks {examples(missing)}, which would stay random. Correct the sizes in "
            "model_config, or name the base of this model."
        )
    if left:
        yield (
            f"load_checkpoint: {path} has {examples(left)}, which the model of the YAML has not. Correct num_layers, "
            "or name the base of this model."
        )
    if other:
        yield (
            f"load_checkpoint: {path} has {other[0]} of shape {tuple(found[other[0]])}, and the model of the YAML has "
            f"it of {wanted[other[0]]} (shapes of {len(other)} weights differ). Correct the sizes in model_config."
        )


def _file_of(path: str, wanted: Optional[str]) -> Optional[str]:
    """Returns a checkpoint, or the first .safetensors file of a folder; None if there is none, or .ckpt is wanted."""
    if os.path.isdir(path):
        found = sorted(os.listdir(path))
        if wanted != "safetensors" and any(name.endswith(".ckpt") for name in found):
            return None
        return next((os.path.join(path, name) for name in found if name.endswith(".safetensors")), None)
    return path if os.path.isfile(path) and path.endswith((".ckpt", ".safetensors")) else None


def _linear_shapes(config: Mapping[str, Any]) -> Dict[str, Tuple[int, int]]:
    """Returns the shapes that the weights of the model's linear cells have by their names; none if not known."""
    model = value_at(config, "model.model_config")
    kind = value_at(config, "model.arch.type") or model.get("type")
    experts = max(value_at(node, "moe_config.expert_num") or 1 for node in (config, model))
    architecture = registry.by_model_type(kind) if not is_mcore(config) and experts == 1 else None
    quantized = (model.get("pet_config") or {}).get("quantize_base")
    if architecture is None or quantized:
        return {}
    try:
        sizes = architecture.linear_sizes(model)
    except (TypeError, ValueError, ZeroDivisionError):
        # number_checks.py names what is wrong.
        return {}
    # A model whose head is its embedding has no weight for it.
    head = architecture.output_head.mindformers
    return {f"{path}.weight": shape for path, shape in sizes.items() if path != head}


def _stored_shapes(path: str) -> Dict[str, Tuple[int, ...]]:
    if path.endswith(".ckpt"):
        return ckpt_file.shapes(path)
    with TensorFile(path) as file:
        return {name: tensor.shape for name, tensor in file.tensors.items()}


def _kind(name: str) -> Optional[str]:
    """Returns a name without the number of its layer, or None if it has none."""
    found, count = re.subn(r"\.\d+\.", ".N.", name)
    return found if count else None
