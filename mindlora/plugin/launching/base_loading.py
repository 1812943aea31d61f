"""Which runs load their base by BaseWeights, tensor by tensor, and not by MindFormers."""

import contextlib
import os

from mindformers.tools.register import MindFormerConfig
from mindspore.nn.utils import no_init_parameters

from mindlora.base.reader import BaseCheckpoint
from mindlora.checks.files import base_of
from mindlora.checks.mcore import is_mcore
from mindlora.checks.model import architecture_of
from mindlora.common.run_modes import TRAINING_MODES
from mindlora.models.architecture import HF, LEGACY


def take_base_over(config: MindFormerConfig) -> contextlib.AbstractContextManager:
    """Has BaseWeights load the base, where it can; returns what the run has to be in.

    Then load_checkpoint is empty for MindFormers, and what is built in the context has no values until they are loaded.
    """
    if not _can_load(config):
        return contextlib.nullcontext()
    callbacks = config.callbacks or []
    config.callbacks = [MindFormerConfig(type="BaseWeights", path=config.load_checkpoint), *callbacks]
    config.load_checkpoint = ""
    return no_init_parameters()


def _can_load(config) -> bool:
    """Tells whether a run trains an adapter on one device, from safetensors of a legacy Llama without an adapter."""
    key, path = base_of(config)
    others = ("use_parallel", "resume_training", "only_save_strategy", "pretrained_model_dir")
    if config.run_mode not in TRAINING_MODES or key != "load_checkpoint" or any(config.get(other) for other in others):
        return False
    architecture = None if is_mcore(config) else architecture_of(config)
    if architecture is None or "LlamaConfig" not in architecture.model_types:
        return False
    if not config.model.model_config.pet_config or not path or not _has_safetensors(path):
        return False
    with BaseCheckpoint(path) as base:
        # What MindFormers saved while it trained an adapter goes on with that adapter.
        return base.world in (HF, LEGACY) and not any("lora" in name for name in base.tensors)


def _has_safetensors(path) -> bool:
    if os.path.isdir(path):
        return any(name.endswith(".safetensors") for name in os.listdir(path))
    return path.endswith(".safetensors")
