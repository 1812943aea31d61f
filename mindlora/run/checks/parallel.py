"""Checks whether a run on several devices can divide the sizes of its model, and its kind of adapter."""

import os
from typing import Any, Iterator, List, Mapping, Optional, Sequence, Tuple

from mindlora.core.fields import COUNT
from mindlora.core.numerics import initializers
from mindlora.core.text import shown
from mindlora.core.yaml_file import PET
from mindlora.models.variants.registry import VARIANTS
from mindlora.models.variants.variant import SHARDED
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import YamlRun

PARALLEL = ("data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage")
# MindFormers' loaders whose columns determine the strategy of the data.
STRATEGIC_LOADERS = ("HFDataLoader", "CommonDataLoader", "BlendedMegatronDatasetDataLoader")
_ADVICE = "Correct one of the two."


def is_scattered(path: Optional[str]) -> bool:
    """Returns whether ``path`` is a folder with slices of an adapter for the ranks of a run."""
    if not path or not os.path.isdir(path):
        return False
    return any(name.startswith("rank_") and name[5:].isdigit() for name in os.listdir(path))


def check_sizes(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each size of the model that is not divisible by the number of its heads or devices."""
    problems = undivided_heads(run.model_config)
    if run.is_sharded:
        parallel = {name: run.setting(f"parallel_config.{name}") for name in PARALLEL}
        problems += undivided_by_devices(run.model_config, parallel, run.stage_offset)
    for problem in problems:
        yield error("model.model_config", f"The sizes in model_config cannot be divided: {problem}.", _ADVICE)


def undivided_heads(model: Mapping[str, Any]) -> List[str]:
    """Returns a sentence on each size of a model that is not divisible by the number of its heads."""
    heads = _first(model, "num_heads", "num_attention_heads")
    # If the size of a head is set, it need not be hidden_size / num_heads.
    head_size = _first(model, "head_dim", "kv_channels", "qk_head_dim")
    return _undivided(
        ("hidden_size", None if head_size else model.get("hidden_size"), "num_heads", heads),
        ("num_heads", heads, "n_kv_heads", _first(model, "n_kv_heads", "num_key_value_heads")),
    )


def undivided_by_devices(model: Mapping[str, Any], parallel: Mapping[str, int], offset: Sequence[int]) -> List[str]:
    """Returns a sentence on each size of a model that cannot be divided among devices.

    ``parallel`` holds the numbers of parallel_config that PARALLEL names, ``offset`` is YamlRun.stage_offset.
    """
    heads = _first(model, "num_heads", "num_attention_heads")
    devices, experts, stages = (parallel[name] for name in ("model_parallel", "expert_parallel", "pipeline_stage"))
    problems = _undivided(
        ("num_heads", heads, "model_parallel", devices),
        ("n_kv_heads", _first(model, "n_kv_heads", "num_key_value_heads") or heads, "model_parallel", devices),
        ("hidden_size", model.get("hidden_size"), "model_parallel", devices),
        ("intermediate_size", model.get("intermediate_size"), "model_parallel", devices),
        ("seq_length", model.get("seq_length"), "context_parallel", parallel["context_parallel"]),
        ("data_parallel x model_parallel", parallel["data_parallel"] * devices, "expert_parallel", experts),
        ("num_experts", model.get("num_experts"), "expert_parallel", experts),
    )
    layers = _first(model, "num_layers", "num_hidden_layers")
    if offset and len(offset) != stages:
        problems.append(f"offset {list(offset)} by pipeline_stage {stages}: it needs a number for each stage")
    elif layers and sum(offset) != layers % stages:
        problems.append(f"num_layers {layers} by pipeline_stage {stages}, without an offset that takes the rest")
    return problems


def _undivided(*pairs: Tuple[str, Any, str, Any]) -> List[str]:
    return [
        f"{name} {size} by {divisor} {parts}"
        for name, size, divisor, parts in pairs
        if size in COUNT and parts in COUNT and size % parts
    ]


def _first(model: Mapping[str, Any], *keys: str) -> Any:
    return next((model[key] for key in keys if model.get(key) is not None), None)


def check_sharded(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each feature that a sharded training run cannot have: adapters that need whole weights, and
    LoraCheckpoint's resume.
    """
    pet_config = run.pet_config
    if is_scattered(pet_config.get("adapter_path")) and not run.in_parallel:
        yield error(
            f"{PET}.adapter_path",
            f"adapter_path: {pet_config['adapter_path']} holds slices of an adapter for the ranks of a sharded run, "
            "but use_parallel is False.",
            "Name the adapter itself.",
        )
    if run.cut_by is None or not run.trains:
        return
    key, value, whole = run.cut_by
    way_out = f"{key.rpartition('.')[2]}: {whole}"
    for field, reason in _needing_wholes(pet_config):
        yield error(
            f"{PET}.{field.split(' ')[0]}",
            f"pet_config has {field} and {key} is {value}: each device then holds only a part of a weight, and "
            f"{reason}.",
            f"Set {way_out}, or train plain LoRA.",
        )
    for where, callback in run.callbacks_of("LoraCheckpoint"):
        if callback.get("resume"):
            yield error(
                where,
                f"LoraCheckpoint has resume: {callback['resume']} and {key} is {value}: LoraCheckpoint joins the "
                "adapter of such a run, but not the state of its optimizer.",
                "Start from the adapter with pet_config.adapter_path, or resume with resume_training from what "
                "CheckpointMonitor saved.",
            )


def check_dataset_strategy(run: YamlRun) -> Iterator[Finding]:
    """Yields the divisions of data among devices that MindFormers refuses, or MindSpore when it compiles."""
    strategy = run.at("parallel.dataset_strategy")
    # These loaders take a strategy regardless of full_batch, and make their own if there is none.
    by_loader = run.at("train_dataset.data_loader.type") in STRATEGIC_LOADERS
    if not run.is_sharded or not run.trains:
        return
    if run.reads_all and not (by_loader and isinstance(strategy, list)) or by_loader and strategy is None:
        return
    data = run.setting("parallel_config.data_parallel")
    columns = run.columns or []
    # A mask of MindFormers' loaders is [batch, 1, N, N]; the other columns are [batch, N].
    needed = [[data, 1, 1, 1] if column == "attention_mask" else [data, 1] for column in columns or ("", "")]
    remedy = f"Set it to {needed} (--parallel.dataset_strategy '{needed}'), or parallel.full_batch: True."
    if not isinstance(strategy, list) or not all(isinstance(part, list) and part for part in strategy):
        yield error(
            "parallel.dataset_strategy",
            f"parallel.full_batch is False, and dataset_strategy is {shown(strategy)}, but it must be a list that says "
            "how each input column is divided.",
            remedy,
        )
    elif strategy[0][0] != data:
        yield error(
            "parallel.dataset_strategy",
            f"parallel_config.data_parallel is {data}, and parallel.dataset_strategy divides the rows by "
            f"{strategy[0][0]}: {shown(strategy)}.",
            remedy,
        )
    elif columns and len(strategy) != len(columns):
        yield error(
            "parallel.dataset_strategy",
            f"parallel.dataset_strategy divides {len(strategy)} input columns, but train_dataset.input_columns has "
            f"{len(columns)}: {', '.join(map(str, columns))}.",
            remedy,
        )


def _needing_wholes(pet_config: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Returns (setting of pet_config, why it needs whole weights)."""
    needing = []
    for variant in VARIANTS:
        if pet_config.get(variant.field):
            needing.append((variant.field, variant.unsupported_on[SHARDED]))
    if pet_config.get("alora_invocation_tokens"):
        needing.append(("alora_invocation_tokens", "each device has tokens of its own"))
    lora_init = pet_config.get("lora_init")
    if initializers.computed_from_base(lora_init) and not pet_config.get("adapter_path"):
        needing.append((f"lora_init {lora_init}", "A and B are computed from all of it"))
    return needing
