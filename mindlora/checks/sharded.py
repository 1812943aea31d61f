"""What a YAML must not combine with a sharded run. Imports no MindFormers."""

import os
from typing import Any, List, Mapping, Optional, Tuple

from mindlora.common.run_modes import SHARDING_MODES
from mindlora.config.variants.registry import VARIANTS
from mindlora.config.variants.variant import SHARDED
from mindlora.errors import ConfigError
from mindlora.numerics import initializers


def is_scattered(path: Optional[str]) -> bool:
    """Tells whether ``path`` is a folder with slices of an adapter for the ranks of a run."""
    if not path or not os.path.isdir(path):
        return False
    return any(name.startswith("rank_") and name[5:].isdigit() for name in os.listdir(path))


def check_sharded(config: Mapping[str, Any]) -> None:
    """Checks a sharded training run: that its kind of adapter can be cut, and that it is not resumed.

    Raises:
        ConfigError: pet_config has what needs whole weights, or LoraCheckpoint has ``resume``.
    """
    cuts = _cuts(config)
    if not cuts:
        return
    key, value, needed = cuts[0]
    way_out = f"{key.rpartition('.')[2]}: {needed}"
    pet_config = config["model"]["model_config"].get("pet_config") or {}
    for field, reason in _needing_wholes(pet_config):
        raise ConfigError(
            f"pet_config has {field} and {key} is {value}: each device then holds only a part of a weight, and "
            f"{reason}. Set {way_out}, or train plain LoRA."
        )
    for callback in config.get("callbacks") or []:
        if callback.get("type") == "LoraCheckpoint" and callback.get("resume"):
            raise ConfigError(
                f"LoraCheckpoint has resume: {callback['resume']} and {key} is {value}: LoraCheckpoint joins the "
                "adapter of such a run, but not the state of its optimizer. Start from the adapter with "
                "pet_config.adapter_path, or resume with resume_training from what CheckpointMonitor saved."
            )


def _cuts(config: Mapping[str, Any]) -> List[Tuple[str, Any, Any]]:
    """Returns (key, its value, the value that cuts nothing) for each key that makes the run a sharded one."""
    if not config.get("use_parallel"):
        return []
    parallel, context = config.get("parallel_config") or {}, config.get("parallel") or {}
    found: List[Tuple[str, Any, Any]] = [
        (f"parallel_config.{key}", parallel[key], 1)
        for key in ("model_parallel", "pipeline_stage", "expert_parallel")
        if (parallel.get(key) or 1) > 1
    ]
    if context.get("enable_parallel_optimizer") and context.get("parallel_mode") in SHARDING_MODES:
        found.append(("parallel.enable_parallel_optimizer", True, False))
    return found


def _needing_wholes(pet_config: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Returns (what pet_config has, why it needs whole weights)."""
    found = []
    for variant in VARIANTS:
        if pet_config.get(variant.field):
            found.append((variant.field, variant.unsupported_on[SHARDED]))
    lora_init = pet_config.get("lora_init")
    if initializers.changes_base(lora_init) and not pet_config.get("adapter_path"):
        found.append((f"lora_init {lora_init}", "A and B are computed from all of it"))
    return found
