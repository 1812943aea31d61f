"""LoRA+ under the PyNative Trainer: groups of parameters by learning rate, and not by weight decay alone."""

import functools
import importlib
from typing import Any, Callable, Dict, List, Sequence

from mindspore import nn
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.core.errors import ConfigError
from mindlora.training.log import logger
from mindlora.training.step.lora_plus_groups import fast_parameters
from mindlora.training.step.rate_factor import ScaledSchedule

UTILS = "mindformers.pynative.trainer.utils"


def with_lora_plus(build_optimizer: Callable, ratio_of: Callable) -> Callable:
    """Returns MindFormers' function that builds the optimizer, which then has ratio times the rate for B.

    ``ratio_of`` takes nothing, and returns pet_config.loraplus_lr_ratio, or None.
    """

    @functools.wraps(build_optimizer)
    def build(config: Any, model: Sequence[nn.Cell], learning_rate: LearningRateSchedule) -> nn.Optimizer:
        ratio = ratio_of()
        if ratio is None:
            return build_optimizer(config, model, learning_rate)
        if config.type != "AdamW":
            raise ConfigError(
                f"pet_config.loraplus_lr_ratio is {ratio} and optimizer.type is {config.type}: LoRA+ works with AdamW "
                "under MindFormers' PyNative Trainer. Set optimizer.type: AdamW, or remove loraplus_lr_ratio."
            )
        utils = importlib.import_module(UTILS)
        groups_of = utils.get_param_groups
        utils.get_param_groups = lambda model, **rules: _by_rate(groups_of(model=model, **rules), model, rates)
        rates = {False: learning_rate, True: ScaledSchedule(learning_rate, ratio)}
        try:
            optimizer = build_optimizer(config, model, learning_rate)
        finally:
            utils.get_param_groups = groups_of
        logger.info("LoRA+: B learns at %g times the rate of lr_scheduler.", ratio)
        return optimizer

    return build


def _by_rate(groups: List[Dict], model: nn.Cell, rates: Dict[bool, LearningRateSchedule]) -> List[Dict]:
    """Splits the groups of an optimizer into those of the parameters that learn faster, and the others."""
    faster = fast_parameters(model)
    split = []
    for group in groups:
        for is_faster, rate in rates.items():
            chosen = [parameter for parameter in group["params"] if (id(parameter) in faster) == is_faster]
            if chosen:
                split.append({**group, "params": chosen, "lr": rate})
    return split
