"""Which training runs have their base loaded tensor by tensor, by BaseWeights, and which leave it to MindFormers."""

import os
from typing import Any, Iterator, Mapping

from mindlora.core.errors import LoraError
from mindlora.core.run_modes import TRAINING_MODES
from mindlora.core.yaml_file import PET, value_at
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.models.architectures.architecture import HF, LEGACY, MCORE
from mindlora.run.checks.files import base_of
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.mcore import is_mcore
from mindlora.run.checks.model import architecture_of
from mindlora.run.checks.parallel import is_scattered, is_sharded
from mindlora.run.checks.pet_config import quantizes_base

_SAFETENSORS = "safetensors"


def loads_by_tensor(config: Mapping[str, Any]) -> bool:
    """Returns whether BaseWeights loads the base of a run: it trains an adapter on whole cells, from safetensors.

    On one device the model is a legacy Llama. In data parallel it may be an mcore model too: MindFormers reads
    safetensors there only to slice them, and never a quantized base. Where the base is not named, or not there,
    load_ckpt_format says whether it will be safetensors.

    What is left to MindFormers draws no weight that is replaced either: where load_checkpoint is set, it builds the
    network without values, for training and evaluation, and draws after loading what the checkpoint lacks, but without
    an error. A .ckpt cannot be read tensor by tensor, evaluation has no callback between building and drawing, and
    slices of ranks and the state of a resumed run are MindFormers' own.
    """
    key, path = base_of(config)
    others = ("resume_training", "only_save_strategy", "pretrained_model_dir")
    if config.get("run_mode") not in TRAINING_MODES or key != "load_checkpoint" or any(map(config.get, others)):
        return False
    if is_sharded(config) or not value_at(config, PET) or not _is_model_taken(config):
        return False
    if not path or not os.path.exists(path):
        return config.get("load_ckpt_format") == _SAFETENSORS
    if not _has_safetensors(path):
        return False
    try:
        with BaseCheckpoint(path) as base:
            # What MindFormers saved while it trained an adapter goes on with that adapter.
            own = MCORE if is_mcore(config) else LEGACY
            return base.world in (HF, own) and not any("lora" in name for name in base.tensors)
    except LoraError:
        # A damaged one is refused where it is read.
        return True


def check_slicing(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields why MindFormers would not slice a base of safetensors for several devices, if it is a whole one."""
    path = base_of(config)[1]
    newer = config.get("checkpoint") or config.get("use_legacy_format") is False
    reads_safetensors = quantizes_base(config) or config.get("load_ckpt_format") == _SAFETENSORS
    if not path or newer or not reads_safetensors or not config.get("use_parallel") or loads_by_tensor(config):
        return
    if os.path.isfile(path) and not os.path.basename(os.path.dirname(path)).startswith("rank_"):
        yield error(
            "load_checkpoint",
            f"load_checkpoint: {path} is a file, and where cells are divided among devices MindFormers reads "
            "safetensors from a folder.",
            "Set parallel.parallel_mode: 0: a quantized base is a file, and each device loads it whole."
            if quantizes_base(config)
            else "Name the folder, with no other checkpoint in it.",
        )
    elif os.path.isdir(path) and not is_scattered(path) and not config.get("auto_trans_ckpt"):
        yield error(
            "auto_trans_ckpt",
            f"auto_trans_ckpt is {config.get('auto_trans_ckpt')!r}, and on several devices MindFormers reads whole "
            f"safetensors, as those in {path}, with True alone.",
            "Set auto_trans_ckpt: True and parallel_mode: 1, or name a .ckpt, which every device reads for itself.",
        )


def _is_model_taken(config: Mapping[str, Any]) -> bool:
    if is_mcore(config):
        return bool(config.get("use_parallel"))
    architecture = architecture_of(config)
    return architecture is not None and "LlamaConfig" in architecture.model_types


def _has_safetensors(path: str) -> bool:
    if os.path.isdir(path):
        return any(name.endswith(f".{_SAFETENSORS}") for name in os.listdir(path))
    return path.endswith(f".{_SAFETENSORS}")
