"""Gradient accumulation of a YAML, which becomes micro-batches of the train step."""

from mindformers.tools.register import MindFormerConfig

from mindlora.run.checks.training import accumulates_here
from mindlora.training.log import logger


def set_micro_batches(config: MindFormerConfig) -> None:
    """Turns K = gradient_accumulation_steps into batches of K batch_size rows and K micro-batches in the train step.

    So one step of MindSpore is one step of the optimizer, of the learning rate and of every callback. The YAML, which
    must have no mistakes, is changed in place.
    """
    steps = config.runner_config.gradient_accumulation_steps
    if steps in (None, 1) or not accumulates_here(config):
        return
    rows = config.runner_config.batch_size
    config.runner_wrapper.micro_batches = steps
    config.runner_config.batch_size = rows * steps
    config.runner_config.gradient_accumulation_steps = 1
    logger.info("Each step has %d rows on each device: %d micro-batches of %d.", rows * steps, steps, rows)
