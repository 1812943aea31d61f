"""AdaLoRA from a YAML: what use_adalora needs besides the cells."""

from mindformers.tools.register import MindFormerConfig

from mindlora.errors import ConfigError
from mindlora.plugin.graph.accumulation import WRAPPER, accumulates_here
from mindlora.plugin.log import logger

CALLBACK = "RankBudget"


def prepare_budget(config: MindFormerConfig) -> None:
    """Adds the callback RankBudget and the train step's part to a training run with use_adalora.

    Args:
        config (MindFormerConfig): The whole YAML; changed in place.

    Raises:
        ConfigError: The train step, the parallel mode or data sinking cannot allocate ranks.
    """
    pet_config = config.model.model_config.pet_config or {}
    if not pet_config.get("use_adalora"):
        return
    if pet_config.get("adapter_path"):
        logger.info(
            "adapter_path is set: the adapter there is trained further as a plain LoRA of the ranks that it has, and "
            "use_adalora allocates none."
        )
        return
    wrapper = config.runner_wrapper or {}
    if wrapper.get("type") != WRAPPER or not accumulates_here(config):
        raise ConfigError(
            "pet_config.use_adalora is True, and ranks are allocated by mindlora's train step, alone or in data "
            f"parallel. Set runner_wrapper.type: {WRAPPER} and parallel.parallel_mode: 0, or remove use_adalora."
        )
    runner = config.runner_config
    if runner.sink_mode and runner.sink_size not in (None, 1):
        raise ConfigError(
            f"pet_config.use_adalora is True and runner_config.sink_size is {runner.sink_size}: ranks are planned for "
            "each step, and data sinking does several at once. Set runner_config.sink_mode: False."
        )
    wrapper.rank_budget = True
    callbacks = list(config.callbacks or [])
    if not any(callback.get("type") == CALLBACK for callback in callbacks):
        config.callbacks = [*callbacks, MindFormerConfig(type=CALLBACK)]
