"""What the YAML of a run of MindFormers' PyNative Trainer that learns from rewards becomes."""

import functools
from typing import Any, Callable

from mindlora.training.rl.data import RlSteps
from mindlora.training.rl.preparation import best_of
from mindlora.training.rl.settings import rl_settings
from mindlora.training.run_configuration import plain


def prepare_pynative_rl(settings: Any) -> None:
    """Completes the configuration of a Trainer whose YAML has ``rl``, in place."""
    node = plain(settings.to_dict()).get("rl")
    if node is None:
        return
    for callback in settings.callbacks:
        if callback.type == "LoraCheckpoint" and not hasattr(callback, "best_metric"):
            for name, value in best_of(rl_settings(node)).items():
                setattr(callback, name, value)


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
