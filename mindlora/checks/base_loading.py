"""Which training runs have their base loaded tensor by tensor, by BaseWeights, and which leave it to MindFormers."""

import os
from typing import Any, Mapping

from mindlora.base.reader import BaseCheckpoint
from mindlora.checks.files import base_of
from mindlora.checks.mcore import is_mcore
from mindlora.checks.model import architecture_of
from mindlora.common.run_modes import TRAINING_MODES
from mindlora.common.yaml_file import PET, value_at
from mindlora.models.architecture import HF, LEGACY

_SAFETENSORS = "safetensors"


def loads_by_tensor(config: Mapping[str, Any]) -> bool:
    """Returns whether a run trains an adapter on one device, from safetensors of a legacy Llama without an adapter.

    Where the base is not named, or not there, load_ckpt_format says whether it will be safetensors.

    What is left to MindFormers draws no weight that is replaced either: where load_checkpoint is set, it builds the
    network without values, for training and evaluation, and draws after loading what the checkpoint lacks, but without
    an error. A .ckpt cannot be read tensor by tensor, evaluation has no callback between building and drawing, and
    slices of ranks and the state of a resumed run are MindFormers' own.
    """
    key, path = base_of(config)
    others = ("use_parallel", "resume_training", "only_save_strategy", "pretrained_model_dir")
    if config.get("run_mode") not in TRAINING_MODES or key != "load_checkpoint" or any(map(config.get, others)):
        return False
    architecture = None if is_mcore(config) else architecture_of(config)
    if architecture is None or "LlamaConfig" not in architecture.model_types or not value_at(config, PET):
        return False
    if not path or not os.path.exists(path):
        return config.get("load_ckpt_format") == _SAFETENSORS
    if not _has_safetensors(path):
        return False
    with BaseCheckpoint(path) as base:
        # What MindFormers saved while it trained an adapter goes on with that adapter.
        return base.world in (HF, LEGACY) and not any("lora" in name for name in base.tensors)


def _has_safetensors(path: str) -> bool:
    if os.path.isdir(path):
        return any(name.endswith(f".{_SAFETENSORS}") for name in os.listdir(path))
    return path.endswith(f".{_SAFETENSORS}")
