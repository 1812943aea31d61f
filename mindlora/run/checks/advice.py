"""What published experience advises, where the settings of a run differ from it: notes of the doctor and of the plan.

Published claims were tried on a small model (docs/benchmarks.md). Advised is what held there: all linear
cells, a higher rate than that of full fine-tuning, and rsLoRA's scale for large ranks.
"""

from typing import Any, Collection, Iterator, Mapping

from mindlora.core.run_modes import TRAINING_MODES
from mindlora.core.yaml_file import PET, value_at
from mindlora.models.variants.registry import VARIANTS
from mindlora.run.checks.finding import Finding, note
from mindlora.run.checks.key_ranges import setting

# The usual rates of full fine-tuning end here, and those of LoRA begin above.
_LOW_RATE = 5e-5
_RATE = "lr_schedule.learning_rate"
# Above it a rank is large, as far as the scale is concerned.
_LARGE_RANK = 32
# rsLoRA itself, and what cannot have it.
_OTHER_SCALES = ("use_rslora", *(variant.field for variant in VARIANTS if variant.allocates_ranks))
# In the paths of cells of MindFormers' models.
_FEED_FORWARD = (".feed_forward.", ".mlp.")


def advise(config: Mapping[str, Any], adapted: Collection[str], linear: Collection[str]) -> Iterator[Finding]:
    """Yields a note for each setting of a training run from which published experience advises otherwise.

    Args:
        config (dict): The YAML's content.
        adapted (collection of str): Paths of the cells that get an adapter; without one, nothing is advised.
        linear (collection of str): Paths of all linear cells.
    """
    if not adapted or config.get("run_mode") not in TRAINING_MODES:
        return
    if any(map(_is_feed_forward, linear)) and not any(map(_is_feed_forward, adapted)):
        yield note(
            f"{PET}.target_modules",
            "Only cells of attention have an adapter.",
            "With as many parameters, all linear cells reach a lower loss (Schulman et al., LoRA Without Regret, "
            "2025): set target_modules: all-linear, with a smaller lora_rank.",
        )
    yield from _advise_scale(config)
    rate = setting(config, _RATE)
    if isinstance(rate, float) and 0 < rate < _LOW_RATE:
        yield note(
            _RATE,
            f"learning_rate is {rate:g}.",
            "LoRA takes a higher rate than full fine-tuning, in large models about ten times (Schulman et al., LoRA "
            "Without Regret, 2025): mostly 1e-4 to 5e-4.",
        )


def _advise_scale(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields a note if the rank is large and lora_alpha does not keep up with it."""
    rank, alpha = (value_at(config, f"{PET}.{field}") for field in ("lora_rank", "lora_alpha"))
    if any(value_at(config, f"{PET}.{field}") for field in _OTHER_SCALES):
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
