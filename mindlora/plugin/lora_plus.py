"""LoRA+ from a YAML: loraplus_lr_ratio becomes MindFormers' own grouped learning rates."""

from mindformers.core.lr import build_lr
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister

from mindlora.errors import ConfigError
from mindlora.plugin.log import logger
from mindlora.training.lora_plus import FASTER, ScaledSchedule

KEY = "loraplus_lr_ratio"


@MindFormerRegister.register(MindFormerModuleType.LR, legacy=True)
class LoraPlusLR(ScaledSchedule):
    """ratio times a schedule of MindFormers' or MindSpore's, for grouped_lr_schedule.

    Args:
        schedule (str): Type of the schedule, as it would stand in lr_schedule.
        ratio (float): The factor.
        **keys: The other keys of that schedule.
    """

    def __init__(self, schedule, ratio, **keys):
        super().__init__(build_lr(class_name=schedule, **keys), ratio)


def set_groups(config: MindFormerConfig, ratio: float) -> None:
    """Puts grouped_lr_schedule in the place of lr_schedule: the same for all, and ratio times that for B.

    Args:
        config (MindFormerConfig): The whole YAML; changed in place.
        ratio (float): loraplus_lr_ratio.

    Raises:
        ConfigError: The YAML has groups of its own.
    """
    if config.grouped_lr_schedule:
        raise ConfigError("The YAML has both pet_config.loraplus_lr_ratio and grouped_lr_schedule: keep one of them.")
    # MindFormers fills in an lr_schedule where the YAML has none.
    keys = dict(config.lr_schedule)
    group = {**keys, "params": list(FASTER), "type": LoraPlusLR.__name__, "schedule": keys["type"], "ratio": ratio}
    config.grouped_lr_schedule = MindFormerConfig(default=dict(keys), grouped=[group])
    logger.info("LoRA+: B learns at %g times the rate of lr_schedule.", ratio)
