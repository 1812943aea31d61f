"""Checks target_modules, ranks and patterns against the linear cells of the model."""

import contextlib
import logging
from typing import Collection, Iterator, List

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.numerics.pair_shapes import LINEAR
from mindlora.core.text import listed
from mindlora.core.yaml_file import PET
from mindlora.models import target_modules
from mindlora.models.description import AdaptableCell
from mindlora.models.lora_config import LoraConfig
from mindlora.models.target_modules import pattern_value
from mindlora.models.trainable import select
from mindlora.models.variants.registry import VARIANTS
from mindlora.models.variants.variant import SHARDED
from mindlora.models.weights import weights_of
from mindlora.run.checks.finding import Finding, error, note, warning
from mindlora.run.checks.model import described_network
from mindlora.run.yaml_run import YamlRun

# Advice from published experience for runs whose settings differ from it: notes of the doctor and of the plan.
#
# Published claims were tried on a small model (docs/benchmarks/claims.md). The advice is what held there: all linear
# cells, a higher rate than in full fine-tuning, and rsLoRA's scale for large ranks.

# Usual rates of full fine-tuning are below this, and LoRA's above.
_LOW_RATE = 5e-5
_RATE = "lr_schedule.learning_rate"
# Ranks above this count as large for the scale.
_LARGE_RANK = 32
# rsLoRA itself, and the variants that cannot have it.
_OTHER_SCALES = ("use_rslora", *(variant.field for variant in VARIANTS if variant.allocates_ranks))
# In the paths of cells of MindFormers' models.
_FEED_FORWARD = (".feed_forward.", ".mlp.")


def advise(run: YamlRun, adapted: Collection[str], linear: Collection[str]) -> Iterator[Finding]:
    """Yields a note for each setting of a training run against which published experience advises.

    Args:
        run (YamlRun): The run.
        adapted (collection of str): Paths of the cells that get an adapter; without one, nothing is advised.
        linear (collection of str): Paths of all linear cells.
    """
    if not adapted or not run.trains:
        return
    if any(map(_is_feed_forward, linear)) and not any(map(_is_feed_forward, adapted)):
        yield note(
            f"{PET}.target_modules",
            "Only cells of attention have an adapter.",
            "With as many parameters, all linear cells reach a lower loss (Schulman et al., LoRA Without Regret, "
            "2025): set target_modules: all-linear, with a smaller lora_rank.",
        )
    yield from _advise_scale(run)
    rate = run.setting(_RATE)
    if isinstance(rate, float) and 0 < rate < _LOW_RATE:
        yield note(
            _RATE,
            f"learning_rate is {rate:g}.",
            "LoRA takes a higher rate than full fine-tuning, in large models about ten times (Schulman et al., LoRA "
            "Without Regret, 2025): mostly 1e-4 to 5e-4.",
        )


def _advise_scale(run: YamlRun) -> Iterator[Finding]:
    """Yields a note if the rank is large and lora_alpha too small for it."""
    rank, alpha = (run.pet_config.get(field) for field in ("lora_rank", "lora_alpha"))
    if any(run.pet_config.get(field) for field in _OTHER_SCALES):
        return
    if isinstance(rank, int) and isinstance(alpha, (int, float)) and rank > _LARGE_RANK and 0 < alpha < rank:
        yield note(
            f"{PET}.lora_rank",
            f"lora_rank is {rank}, and lora_alpha / lora_rank, the scale, is {alpha / rank:g}.",
            "At the same learning rate, such an adapter learns no more than one of a low rank (Kalajdzievski, rsLoRA, "
            "2023): set use_rslora: True, or try a higher rate.",
        )


def _is_feed_forward(path: str) -> bool:
    return any(part in path for part in _FEED_FORWARD)


def check_targets(run: YamlRun, lora: LoraConfig) -> List[Finding]:
    """Returns the cells that get an adapter, and faults of the selection, if mindlora.models knows the cells.

    ``lora`` is the configuration for apply_lora.
    """
    try:
        network = described_network(run)
    except ConfigError as refusal:
        return [error("model.model_config", str(refusal))]
    if network is None:
        experts = " with experts" if run.legacy_experts > 1 else ""
        text = (
            f"The model is {run.model_name}{experts}: the doctor does not know its cells, so targets and ranks were "
            "not checked."
        )
        return [note(f"{PET}.target_modules", text)]
    if run.is_sharded and run.cut_by is None:
        network = network.sharded(SHARDED)
    with _warnings_of(target_modules.logger) as messages:
        try:
            selection = select(network, lora)
            lora.variant.check_paths(list(selection.parts))
            weights_of(network, lora, selection)
        except LoraError as refusal:
            field = str(refusal).split(" ")[0]
            return [error(f"{PET}.{field if hasattr(lora, field) else 'target_modules'}", str(refusal))]
    saved = ", those of modules_to_save included" if selection.saved else ""
    text = (
        f"LoRA on {len(selection.parts)} cells, {selection.trainable:,} parameters{saved}: {listed(selection.parts)}."
    )
    return [
        *(warning(f"{PET}.target_modules", message) for message in messages),
        note(f"{PET}.target_modules", text),
        *_check_ranks(list(selection.cells.values()), lora),
        *_check_patterns(list(selection.parts), lora),
        *advise(run, selection.parts, [cell.prefix for cell in network.of_kind(LINEAR).values()]),
    ]


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
    """Yields a list that collects the warnings of ``logger`` in place of showing them."""
    collector = _Collector(logging.WARNING)
    before = logger.handlers, logger.propagate
    logger.handlers = [collector]
    logger.propagate = False
    try:
        yield collector.messages
    finally:
        logger.handlers, logger.propagate = before
