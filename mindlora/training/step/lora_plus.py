"""LoRA+ from a YAML: loraplus_lr_ratio becomes MindFormers' own grouped learning rates."""

from typing import Any

from mindformers.core.lr import build_lr
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister

from mindlora.training.log import logger
from mindlora.training.step.lora_plus_groups import FASTER
from mindlora.training.step.rate_factor import ScaledSchedule

KEY = "loraplus_lr_ratio"


@MindFormerRegister.register(MindFormerModuleType.LR, legacy=True)
class LoraPlusLR(ScaledSchedule):
    """A schedule of MindFormers or MindSpore times a ratio, for grouped_lr_schedule.

    Args:
        schedule (str): The schedule's type, as in lr_schedule.
        ratio (float): The factor.
        **keys: The schedule's other keys.
    """

    def __init__(self, schedule: str, ratio: float, **keys: Any):
        super().__init__(build_lr(class_name=schedule, **keys), ratio)


def set_groups(config: MindFormerConfig, ratio: float) -> None:
    """Sets grouped_lr_schedule from a YAML's lr_schedule, with ratio times its rate for B (and DoRA's magnitudes)."""
    # If the YAML has no lr_schedule, MindFormers has filled one in.
    keys = dict(config.lr_schedule)
    group = {**keys, "params": list(FASTER), "type": LoraPlusLR.__name__, "schedule": keys["type"], "ratio": ratio}
    config.grouped_lr_schedule = MindFormerConfig(default=dict(keys), grouped=[group])
    logger.info("LoRA+: B learns at %g times the rate of lr_schedule.", ratio)
