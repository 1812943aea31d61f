"""Checks of target_modules, ranks and patterns against the linear cells that the model will have."""

import contextlib
import logging
import re
from typing import Dict, Iterator, List, Optional, Tuple

from mindlora.checks.finding import Finding
from mindlora.checks.mcore import family_of, is_mcore, model_config_of
from mindlora.common.text import listed
from mindlora.common.yaml_file import PET, value_at
from mindlora.config import LoraConfig
from mindlora.errors import TargetError
from mindlora.models import registry, targets
from mindlora.models.architecture import Architecture
from mindlora.models.targets import pattern_value

Sizes = Dict[str, Tuple[int, int]]


def check_targets(config: dict, lora: LoraConfig) -> List[Finding]:
    """Checks target_modules and what depends on it, if mindlora.models knows the model's cells.

    Args:
        config (dict): The YAML.
        lora (LoraConfig): Its pet_config.

    Returns:
        list of Finding: which cells get an adapter, and what is wrong with the selection.
    """
    architecture = _architecture(config)
    if architecture is None:
        return [_unknown_model(config)]
    try:
        sizes = architecture.linear_sizes(model_config_of(config))
    except (TypeError, ValueError, ZeroDivisionError) as error:
        found = f"The sizes of the model cannot be worked out: {error}."
        advice = (
            "hidden_size, num_layers, num_heads, n_kv_heads, vocab_size and intermediate_size must be whole numbers."
        )
        return [Finding("error", "model.model_config", found, advice)]
    # MindFormers' mcore models have an embedding that takes no adapter.
    if lora.target_modules != targets.ALL_LINEAR and not is_mcore(config):
        sizes[architecture.embedding.mindformers] = sizes[architecture.output_head.mindformers]
    if lora.target_modules is None:
        return list(_check_parameters(architecture, lora))
    with _warnings_of(targets.logger) as messages:
        try:
            selected = targets.select_targets(
                [*sizes, *_stacked_weights(architecture, sizes, lora)],
                lora.target_modules,
                lora.exclude_modules,
                layers=lora.layers_to_transform,
            )
        except TargetError as error:
            field = str(error).split(" ")[0]
            return [Finding("error", f"{PET}.{field}", str(error))]
    stacked, selected = [p for p in selected if p not in sizes], [p for p in selected if p in sizes]
    return [
        *(Finding("warning", f"{PET}.target_modules", message) for message in messages),
        *(Finding("note", f"{PET}.target_modules", _uncounted(listed(stacked))) for _ in stacked[:1]),
        _count_parameters(selected, sizes, lora),
        *_check_ranks(selected, sizes, lora),
        *_check_patterns(selected, lora),
        *_check_parameters(architecture, lora),
    ]


def _model_type(config) -> Tuple[Optional[str], bool]:
    """Returns the type of the model, and whether it is a legacy one with experts."""
    if is_mcore(config):
        return family_of(config), False
    model_config = config["model"]["model_config"]
    experts = max(value_at(node, "moe_config.expert_num") or 1 for node in (config, model_config))
    return value_at(config, "model.arch.type") or model_config.get("type"), experts > 1


def _architecture(config) -> Optional[Architecture]:
    """Returns the record of the model's cells, or None where they are not known."""
    kind, has_experts = _model_type(config)
    return None if has_experts else registry.by_model_type(kind)


def _unknown_model(config) -> Finding:
    kind, has_experts = _model_type(config)
    found = (
        f"The model is {kind}{' with experts' * has_experts}: the doctor does not know its cells, so targets and "
        "ranks were not checked."
    )
    return Finding("note", f"{PET}.target_modules", found)


def _count_parameters(selected, sizes: Sizes, lora) -> Finding:
    count = 0
    for path in selected:
        cell, (out_channels, in_channels) = lora.for_cell(path), sizes[path]
        # VeRA and AdaLoRA train a vector of the rank; DoRA and VeRA train one of the out_channels.
        count += cell.lora_rank * (1 if cell.use_vera else out_channels + in_channels)
        count += (cell.use_dora or cell.use_vera) * out_channels + cell.use_adalora * cell.lora_rank
    found = f"LoRA on {len(selected)} cells, {count:,} parameters: {listed(selected)}."
    return Finding("note", f"{PET}.target_modules", found)


def _check_ranks(selected, sizes: Sizes, lora) -> Iterator[Finding]:
    # VeRA's rank may be larger, because its matrices are not trained.
    too_high = [path for path in selected if lora.for_cell(path).lora_rank > min(sizes[path]) and not lora.use_vera]
    if too_high:
        smallest = min(min(sizes[path]) for path in too_high)
        yield Finding(
            "warning",
            f"{PET}.lora_rank",
            f"The rank exceeds the smaller dimension of {len(too_high)} weights (at least {smallest}): "
            f"{listed(too_high)}.",
            "The change of a weight cannot have a higher rank than that. Lower lora_rank, or lower it for just these "
            "cells with rank_pattern.",
        )


def _stacked_weights(architecture: Architecture, sizes: Sizes, lora) -> List[str]:
    """Returns the paths that stacked weights of experts would have in every layer; all-linear leaves them out."""
    if lora.target_modules == targets.ALL_LINEAR:
        return []
    layers = dict.fromkeys(
        path[: found.end()] for path in sizes if (found := re.match(r".*?layers\.\d+(\.transformer_layer)?", path))
    )
    return [f"{layer}.{stack.names.mcore}" for layer in layers for stack in architecture.experts]


def _uncounted(weights: str) -> str:
    return f"LoRA on the stacked weights {weights} too, which are not in the count."


def _check_parameters(architecture: Architecture, lora) -> Iterator[Finding]:
    known = [name for stack in architecture.experts for name in dict.fromkeys(stack.names) if name]
    modules = [name.rpartition(".")[0] for name in known]
    key = f"{PET}.target_parameters"
    for wanted in lora.target_parameters or ():
        if any(("." + name).endswith("." + wanted) or wanted.endswith("." + name) for name in known + modules):
            yield Finding("note", key, _uncounted(wanted))
        else:
            found = f"{wanted!r} is no stacked weight of {architecture.title}."
            yield Finding("error", key, found, f"It has: {listed(known) or 'none'}.")


def _check_patterns(selected, lora) -> Iterator[Finding]:
    for field in ("rank_pattern", "alpha_pattern"):
        for expression in getattr(lora, field) or {}:
            if not any(pattern_value({expression: True}, path, False) for path in selected):
                yield Finding(
                    "warning",
                    f"{PET}.{field}",
                    f"{expression!r} matches none of the cells that target_modules selects.",
                    f"target_modules selects: {listed(selected)}.",
                )


class _Collector(logging.Handler):
    """Collects messages."""

    def __init__(self, level: int):
        super().__init__(level)
        self.messages: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def _warnings_of(logger):
    """Yields a list that collects the warnings of ``logger``, which are not shown meanwhile."""
    collector = _Collector(logging.WARNING)
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [collector], False
    try:
        yield collector.messages
    finally:
        logger.handlers, logger.propagate = before
