"""What a YAML says of the train step in other places: micro-batches, AdaLoRA's budget, the exchange, recorded norms."""

from mindformers.tools.register import MindFormerConfig

from mindlora.checks.training import DATA_PARALLEL, WRAPPER, accumulates_here, callbacks_of, train_step
from mindlora.config.variants.adalora import ADALORA
from mindlora.errors import ConfigError
from mindlora.plugin.log import logger
from mindlora.training.exchange import exchange_settings

# Where one of these is above 1, no rank holds the whole adapter.
_SPLITS = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")


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
    """Checks ``gradient_exchange`` of a training run, and has data-parallel ranks compare their adapters.

    The YAML's callbacks get ExchangeCheck if it is due. Raises ConfigError if a setting is wrong, or the parallel mode
    cannot have it.
    """
    wrapper = config.get("runner_wrapper") or {}
    setting = wrapper.get("gradient_exchange")
    settings = exchange_settings("dense" if setting is None else setting)
    if setting is not None and wrapper.get("type") != WRAPPER:
        raise ConfigError(
            f"gradient_exchange is an argument of {WRAPPER}, and runner_wrapper.type is {wrapper.get('type')!r}. Set "
            f"it to {WRAPPER}, or remove gradient_exchange."
        )
    if not config.get("use_parallel"):
        return
    parallel = config.get("parallel") or {}
    split = config.get("parallel_config") or {}
    problems = [f"parallel_config.{key} is {split[key]}" for key in _SPLITS if (split.get(key) or 1) > 1]
    if parallel.get("enable_parallel_optimizer"):
        problems.append("parallel.enable_parallel_optimizer is True")
    if parallel.get("parallel_mode", 0) not in DATA_PARALLEL:
        problems.append(f"parallel.parallel_mode is {parallel['parallel_mode']!r}")
    if problems and settings.type != "dense":
        raise ConfigError(
            f"gradient_exchange is {settings.type}, and {problems[0]}: gradients are compressed only between ranks "
            "that each hold the whole adapter (parallel_mode 0). Use dense, or data parallelism alone."
        )
    if not problems and settings.check_every and wrapper.get("type") == WRAPPER:
        check = MindFormerConfig(type="ExchangeCheck", check_every=settings.check_every)
        config.callbacks = [*(config.callbacks or []), check]


def record_gradient_norms(config: MindFormerConfig) -> None:
    """Has the train step record the norms of gradients that AdapterHealth reports; the YAML is changed in place."""
    reports = any(callbacks_of(config, "AdapterHealth"))
    if reports and train_step(config) == WRAPPER and accumulates_here(config):
        config.runner_wrapper.setdefault("record_gradient_norms", True)
