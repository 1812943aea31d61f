"""What the YAML of a run of MindFormers' PyNative Trainer that learns from rewards becomes."""

import functools
from typing import Any, Callable

from mindlora.core.errors import ConfigError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.training.rl.callback import RlReport
from mindlora.training.rl.data import RlSteps
from mindlora.training.rl.preparation import best_of
from mindlora.training.rl.pynative_rules import as_in_graph_mode
from mindlora.training.rl.rules import settings_of
from mindlora.training.run_configuration import plain

require_mindformers("2.0")
from mindformers.pynative.config.config import CallbackConfig  # noqa: E402


def check_processes(settings: Any, processes: int) -> None:
    """Raises ConfigError if the YAML of a Trainer has ``rl`` and the run has several processes."""
    if getattr(settings, "rl", None) is not None and processes > 1:
        raise ConfigError(
            f"The YAML has rl, and a run learns from rewards in one process, but this one has {processes}. Start one."
        )


def prepare_pynative_rl(settings: Any) -> None:
    """Completes the configuration of a Trainer whose YAML has ``rl`` and no mistakes, in place."""
    if getattr(settings, "rl", None) is None:
        return
    # Adapters that learn side by side have the same metric.
    first = next(iter(settings_of(as_in_graph_mode(plain(settings.to_dict()))).values()))
    for callback in settings.callbacks:
        if callback.type == "LoraCheckpoint" and not hasattr(callback, "best_metric"):
            for name, value in best_of(first).items():
                setattr(callback, name, value)
    settings.callbacks = [*settings.callbacks, CallbackConfig.from_dict({"type": RlReport.__name__})]


def with_steps_of_rl(build_dataset: Callable, current_trainer: Callable) -> Callable:
    """Returns MindFormers' function that builds a dataset, which then has the numbers of steps if the YAML has ``rl``.

    ``current_trainer`` returns the Trainer that calls it.
    """

    @functools.wraps(build_dataset)
    def build(config: Any, *arguments: Any, **keywords: Any) -> Any:
        settings = current_trainer().config
        if getattr(settings, "rl", None) is None or config is not settings.train_dataset:
            return build_dataset(config, *arguments, **keywords)
        return RlSteps(config, settings.training.steps)

    return build
