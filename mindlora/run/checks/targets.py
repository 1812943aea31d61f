"""Checks of target_modules, ranks and patterns against the linear cells that the model will have."""

import contextlib
import logging
from typing import Any, Iterator, List, Mapping

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.numerics.pair_shapes import LINEAR
from mindlora.core.text import listed
from mindlora.core.yaml_file import PET
from mindlora.models import target_modules
from mindlora.models.description import AdaptableCell
from mindlora.models.lora_config import LoraConfig
from mindlora.models.target_modules import pattern_value
from mindlora.models.trainable import Selection, select
from mindlora.models.variants.variant import SHARDED
from mindlora.models.weights import weights_of
from mindlora.run.checks.advice import advise
from mindlora.run.checks.finding import Finding, error, note, warning
from mindlora.run.checks.model import described_network, legacy_experts, model_name
from mindlora.run.checks.parallel import cut_by, is_sharded


def check_targets(config: Mapping[str, Any], lora: LoraConfig) -> List[Finding]:
    """Returns which cells get an adapter and what is wrong with the selection, if mindlora.models knows the cells.

    ``lora`` is what apply_lora gets.
    """
    try:
        network = described_network(config)
    except ConfigError as refusal:
        return [error("model.model_config", str(refusal))]
    if network is None:
        return [_unknown_model(config)]
    if is_sharded(config) and cut_by(config) is None:
        network = network.sharded(SHARDED)
    with _warnings_of(target_modules.logger) as messages:
        try:
            selection = select(network, lora)
            lora.variant.check_paths(list(selection.parts))
            weights_of(network, lora, selection)
        except LoraError as refusal:
            field = str(refusal).split(" ")[0]
            return [error(f"{PET}.{field if hasattr(lora, field) else 'target_modules'}", str(refusal))]
    return [
        *(warning(f"{PET}.target_modules", message) for message in messages),
        _count_parameters(selection),
        *_check_ranks(list(selection.cells.values()), lora),
        *_check_patterns(list(selection.parts), lora),
        *advise(config, selection.parts, [cell.prefix for cell in network.of_kind(LINEAR).values()]),
    ]


def _unknown_model(config: Mapping[str, Any]) -> Finding:
    experts = " with experts" if legacy_experts(config) > 1 else ""
    text = (
        f"The model is {model_name(config)}{experts}: the doctor does not know its cells, so targets and ranks were "
        "not checked."
    )
    return note(f"{PET}.target_modules", text)


def _count_parameters(selection: Selection) -> Finding:
    saved = ", those of modules_to_save included" if selection.saved else ""
    text = (
        f"LoRA on {len(selection.parts)} cells, {selection.trainable:,} parameters{saved}: {listed(selection.parts)}."
    )
    return note(f"{PET}.target_modules", text)


def _check_ranks(cells: List[AdaptableCell], lora: LoraConfig) -> Iterator[Finding]:
    smaller = {}
    for cell in cells:
        side = min(cell.shape[-2:])
        if lora.variant.bounded_rank and lora.for_cell(cell.prefix).lora_rank > side:
            smaller[cell.prefix] = side
    if smaller:
        yield warning(
            f"{PET}.lora_rank",
            f"The rank exceeds the smaller dimension of {len(smaller)} weights (at least {min(smaller.values())}): "
            f"{listed(smaller)}.",
            "The change of a weight cannot have a higher rank than that. Lower lora_rank, or lower it for just these "
            "cells with rank_pattern.",
        )


def _check_patterns(selected, lora) -> Iterator[Finding]:
    for field in ("rank_pattern", "alpha_pattern"):
        for expression in getattr(lora, field) or {}:
            if not any(pattern_value({expression: True}, path, False) for path in selected):
                yield warning(
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
    logger.handlers = [collector]
    logger.propagate = False
    try:
        yield collector.messages
    finally:
        logger.handlers, logger.propagate = before
