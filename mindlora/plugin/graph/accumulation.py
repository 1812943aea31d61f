"""Gradient accumulation from a YAML: a larger batch, which the train step takes apart into micro-batches."""

from mindformers.tools.register import MindFormerConfig

from mindlora.errors import ConfigError
from mindlora.plugin.log import logger

WRAPPER = "LoraTrainOneStepCell"
DATA_PARALLEL = (0, "DATA_PARALLEL", "data_parallel")
# Alone and in data parallel, MindFormers sets gradient_accumulation_steps to 1; in the other modes it accumulates.
_MODES = (*DATA_PARALLEL, "STAND_ALONE", "stand_alone", None)


def accumulates_here(config: MindFormerConfig) -> bool:
    """Returns whether a run is alone or data parallel, where mindlora's train step accumulates gradients."""
    return not config.use_parallel or (config.parallel or {}).get("parallel_mode") in _MODES


def set_micro_batches(config: MindFormerConfig) -> None:
    """Turns K = gradient_accumulation_steps into batches of K batch_size rows and K micro-batches in the train step.

    So one step of MindSpore is one step of the optimizer, of the learning rate and of every callback.

    Args:
        config (MindFormerConfig): The whole YAML; changed in place.

    Raises:
        ConfigError: K is no whole number of at least 1; the train step is not mindlora's; or the last batch of the
            data may be smaller.
    """
    steps = config.runner_config.gradient_accumulation_steps
    if steps is None or not accumulates_here(config):
        return
    key = "runner_config.gradient_accumulation_steps"
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"{key} is {steps!r}, but it must be a whole number of at least 1.")
    if steps == 1:
        return
    wrapper = config.runner_wrapper
    if not wrapper or wrapper.type != WRAPPER:
        raise ConfigError(
            f"{key} is {steps}, and runner_wrapper.type is {wrapper.type if wrapper else None}, which accumulates "
            f"nothing alone and in data parallel. Set runner_wrapper.type: {WRAPPER}."
        )
    if wrapper.get("micro_batches"):
        raise ConfigError(f"The YAML has both {key} and runner_wrapper.micro_batches: keep the first.")
    if not config.train_dataset.drop_remainder:
        raise ConfigError(
            f"{key} is {steps}, and train_dataset.drop_remainder is not True: the last batch of the data could not be "
            "split into micro-batches. Set it to True."
        )
    rows = config.runner_config.batch_size
    wrapper.micro_batches = steps
    config.runner_config.batch_size = rows * steps
    config.runner_config.gradient_accumulation_steps = 1
    logger.info("Each step has %d rows on each device: %d micro-batches of %d.", rows * steps, steps, rows)
