"""From gradient_exchange, an argument of runner_wrapper in the YAML, to the exchange that the train step uses."""

from typing import Any, Mapping, Union

from mindformers.tools.register import MindFormerConfig
from mindspore.communication import get_group_size, get_local_rank_size, get_rank

from mindlora.errors import ConfigError
from mindlora.plugin.graph.accumulation import DATA_PARALLEL, WRAPPER
from mindlora.plugin.log import logger
from mindlora.training.exchange import Exchange, FlatLayout, Ranks, exchange_settings
from mindlora.training.exchange.make import make_exchange

_SPLITS = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")


def build_exchange(setting: Union[str, Mapping[str, Any]], layout: FlatLayout) -> Exchange:
    """Returns the exchange for the train step of one of several data-parallel processes.

    Args:
        setting (str or dict): ``gradient_exchange`` of the YAML.
        layout (FlatLayout): The layout of the trained parameters' gradients.

    Raises:
        ConfigError: The setting is wrong.
    """
    ranks = Ranks(get_rank(), get_group_size())
    exchange = make_exchange(exchange_settings(setting), layout, ranks, get_local_rank_size())
    first, later = exchange.bytes_at(0), exchange.bytes_at(2**31 - 1)
    logger.info(
        "Gradient exchange %s: rank %d of %d sends %s bytes per step, %s of them to other machines.",
        setting if isinstance(setting, str) else setting.get("type"),
        ranks.rank,
        ranks.count,
        f"{first:,}" if first == later else f"{first:,} at first and {later:,} after the warm-up",
        f"{exchange.bytes_between_machines_at(2**31 - 1):,}",
    )
    return exchange


def prepare_exchange(config: MindFormerConfig) -> None:
    """Checks ``gradient_exchange`` of a training run, and has data-parallel ranks compare their adapters.

    Args:
        config (MindFormerConfig): The whole YAML; its callbacks get ExchangeCheck if it is due.

    Raises:
        ConfigError: A setting is wrong, or the parallel mode cannot have it.
    """
    wrapper = config.get("runner_wrapper") or {}
    given = wrapper.get("gradient_exchange")
    settings = exchange_settings("dense" if given is None else given)
    if given is not None and wrapper.get("type") != WRAPPER:
        raise ConfigError(
            "gradient_exchange is an argument of LoraTrainOneStepCell, and runner_wrapper.type is "
            f"{wrapper.get('type')!r}. Set it to LoraTrainOneStepCell, or remove gradient_exchange."
        )
    if not config.get("use_parallel"):
        return
    parallel, split = config.get("parallel") or {}, config.get("parallel_config") or {}
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
