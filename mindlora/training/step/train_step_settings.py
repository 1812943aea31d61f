"""What a YAML says of the train step in other places: micro-batches, AdaLoRA's budget, the exchange, recorded norms."""

from mindformers.tools.register import MindFormerConfig

from mindlora.core.yaml_file import value_at
from mindlora.models.variants.adalora import ADALORA
from mindlora.run.checks.training import EXCHANGE, WRAPPER, accumulates_here, callbacks_of, split_by, train_step
from mindlora.training.exchange.settings import exchange_settings
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


def prepare_budget(config: MindFormerConfig) -> None:
    """Adds the callback RankBudget and the train step's part to the YAML of a training run of AdaLoRA."""
    pet_config = config.model.model_config.pet_config or {}
    if not pet_config.get(ADALORA.field):
        return
    if pet_config.get("adapter_path"):
        logger.info(
            "adapter_path is set: the adapter there is trained further as a plain LoRA of the ranks that it has, and "
            "%s allocates none.",
            ADALORA.field,
        )
        return
    config.runner_wrapper.rank_budget = True
    callbacks = list(config.callbacks or [])
    if not any(callback.get("type") == "RankBudget" for callback in callbacks):
        config.callbacks = [*callbacks, MindFormerConfig(type="RankBudget")]


def prepare_exchange(config: MindFormerConfig) -> None:
    """Makes data-parallel ranks compare their adapters: adds ExchangeCheck to the YAML, which must have no mistakes."""
    settings = exchange_settings(value_at(config, EXCHANGE) or "dense")
    whole = config.get("use_parallel") and not split_by(config)
    if whole and settings.check_every and train_step(config) == WRAPPER:
        check = MindFormerConfig(type="ExchangeCheck", check_every=settings.check_every)
        config.callbacks = [*(config.callbacks or []), check]


def record_gradient_norms(config: MindFormerConfig) -> None:
    """Makes the train step record the norms of gradients that AdapterHealth reports; the YAML is changed in place."""
    reports = any(callbacks_of(config, "AdapterHealth"))
    if reports and train_step(config) == WRAPPER and accumulates_here(config):
        config.runner_wrapper.setdefault("record_gradient_norms", True)
