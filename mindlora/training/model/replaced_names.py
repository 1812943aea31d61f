"""The names that mindlora replaces in MindFormers: this one, and why."""

import functools
from typing import Any, Callable

import mindspore as ms
from mindspore.communication import get_group_size


def allow_data_parallel() -> None:
    """Lets MindFormers build its mcore models in data parallel (parallel_mode 0) on several devices.

    Its Trainer (1.8.0, 1.9.0 and 2.1.0) sets data_parallel to 1 in that mode, and its GPTModel then makes process
    groups of these sizes and refuses them, since 1 is not the number of devices. No key of a YAML reaches either. Only
    the number of devices is set right: the model keeps data_parallel 1, by which it reshapes the rows of its device.
    """
    try:
        from mindformers.parallel_core.training_graph.base_models.gpt import gpt_model
    except ImportError:
        return  # MindFormers without mcore models.
    replaced = getattr(gpt_model, "initialize_model_parallel", None)
    if replaced is not None and not hasattr(replaced, "__wrapped__"):
        gpt_model.initialize_model_parallel = _for_all_devices(replaced)


def _for_all_devices(initialize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(initialize)
    def initialize_model_parallel(**sizes: Any) -> None:
        if ms.get_auto_parallel_context("parallel_mode") == "data_parallel":
            sizes["data_parallel_size"] = get_group_size()
        initialize(**sizes)

    return initialize_model_parallel
