"""The names that mindlora replaces in MindFormers, each with the reason; nothing else in MindFormers is changed."""

import functools
import importlib
import importlib.metadata
import inspect
from typing import Any, Callable, NamedTuple, Tuple

import mindspore as ms
from mindspore.communication import get_group_size

from mindlora.core.errors import InstallationError
from mindlora.core.mindformers_version import release


class Replaced(NamedTuple):
    """A name in a MindFormers module or class, and its replacement.

    Attributes:
        module (str): The module of MindFormers.
        name (str): The name there, "Trainer.training_step" for a method.
        arguments (tuple of str): The arguments with which MindFormers calls it.
        by (str): "module.function" below mindlora.training. The function takes the original object and returns the
            replacement.
        reason (str): Why neither a YAML key nor a registry suffices.
    """

    module: str
    name: str
    arguments: Tuple[str, ...]
    by: str
    reason: str


_GPT = "mindformers.parallel_core.training_graph.base_models.gpt.gpt_model"
_TRAINER = "mindformers.pynative.trainer.trainer"
_BUILDING = ("model", "config", "strict")
_SIZES = (
    *("tensor_model_parallel_size", "data_parallel_size"),
    *("pipeline_model_parallel_size", "context_parallel_size"),
)

# MindFormers 1.8.0, 1.9.0 and 2.1.0.
IN_GRAPH_MODE = (
    Replaced(
        _GPT,
        "initialize_model_parallel",
        _SIZES,
        "replaced_names.for_all_devices",
        "Its Trainer sets data_parallel to 1 with parallel_mode 0, and GPTModel then makes process groups of these "
        "sizes and refuses them, since 1 is not the number of devices.",
    ),
)
# MindFormers 2.0 and 2.1, whose PyNative Trainer has no registry for the objects that it builds.
KNOWN_PYNATIVE_RELEASES = ((2, 0), (2, 1))
IN_PYNATIVE = (
    Replaced(
        "mindformers.pynative.trainer.utils",
        "build_lora_model",
        _BUILDING,
        "pynative.pet.with_adapters_of_mindlora",
        "The Trainer builds MindFormers' own LoRA cells.",
    ),
    Replaced(
        "mindformers.pynative.base_models.gpt.parallelize",
        "build_lora_model",
        _BUILDING,
        "pynative.pet.with_adapters_of_mindlora",
        "So does each stage of a pipeline.",
    ),
    Replaced(
        _TRAINER,
        "freeze_base_params",
        ("model",),
        "pynative.pet.with_freezing_of_mindlora",
        "Saved modules and freeze_include train too.",
    ),
    Replaced(
        _TRAINER,
        "_calculate_global_grad_norm",
        ("parameters", "enable_parallel", "max_norm"),
        "pynative.pet.with_all_gradients",
        "A parameter without a gradient would shift those of all others.",
    ),
    Replaced(
        _TRAINER,
        "_build_optimizer",
        ("config", "model", "learning_rate"),
        "pynative.pet.with_pet_config",
        "Parameters are grouped by weight decay alone, and an optimizer trains one adapter.",
    ),
    Replaced(
        _TRAINER,
        "_build_dataset",
        ("config", "parallelism"),
        "pynative.pet.with_data_of_each",
        "Several adapters may have data of their own.",
    ),
    Replaced(
        _TRAINER,
        "CallbackHandler",
        ("callbacks", "model", "train_dataset", "optimizer"),
        "pynative.callbacks.with_callbacks",
        "Callbacks of graph mode have another form.",
    ),
    Replaced(
        _TRAINER,
        "Trainer.training_step",
        ("self", "step"),
        "pynative.callbacks.with_begun_step",
        "Callbacks must see a step before it is computed.",
    ),
    Replaced(
        _TRAINER,
        "Trainer.compute_loss",
        ("self", "model", "inputs"),
        "pynative.callbacks.with_weights",
        "Micro-batches weigh by their tokens.",
    ),
    Replaced(
        _TRAINER,
        "Trainer._optimizer_update",
        ("self",),
        "pynative.callbacks.with_skipping",
        "A step that diverges must not change the weights.",
    ),
    Replaced(
        "mindformers.checkpoint.checkpoint",
        "load_param_into_net",
        ("net", "parameter_dict"),
        "pynative.pet.strictly",
        "What a checkpoint lacks is only logged, and a base in 4 bits is packed on the way.",
    ),
)


@functools.lru_cache(maxsize=None)
def replace_in_graph_mode() -> None:
    """Replaces the names of IN_GRAPH_MODE that this MindFormers has; later calls do nothing."""
    for replaced in IN_GRAPH_MODE:
        try:
            owner, name = _owner_of(replaced)
        except ImportError:
            continue  # MindFormers without mcore models.
        if hasattr(owner, name):
            _replace(replaced, owner, name)


@functools.lru_cache(maxsize=None)
def replace_in_pynative() -> None:
    """Replaces the names of IN_PYNATIVE; later calls do nothing.

    Raises:
        InstallationError: mindlora does not know the PyNative Trainer of the installed MindFormers.
    """
    version = importlib.metadata.version("mindformers")
    if release(version) not in KNOWN_PYNATIVE_RELEASES:
        raise InstallationError(
            f"MindFormers {version} is installed, but mindlora knows the PyNative Trainer of 2.0 and 2.1 alone. "
            "Install one of these."
        )
    owners = [_owner_of(replaced) for replaced in IN_PYNATIVE]
    for replaced, (owner, name) in zip(IN_PYNATIVE, owners):
        before = getattr(owner, name, None)
        arguments = tuple(inspect.signature(before).parameters) if before is not None else ()
        if not set(replaced.arguments) <= set(arguments):
            raise InstallationError(
                f"{replaced.name} of {replaced.module} takes ({', '.join(arguments)}) in MindFormers {version}, and "
                f"mindlora knows it with ({', '.join(replaced.arguments)}). Install MindFormers as it was published."
            )
    for replaced, (owner, name) in zip(IN_PYNATIVE, owners):
        _replace(replaced, owner, name)


def _owner_of(replaced: Replaced) -> Tuple[Any, str]:
    """Returns the module or class that has a name, and the name within it."""
    *path, name = replaced.name.split(".")
    return functools.reduce(getattr, path, importlib.import_module(replaced.module)), name


def _replace(replaced: Replaced, owner: Any, name: str) -> None:
    module, _, function = replaced.by.rpartition(".")
    by = getattr(importlib.import_module(f"mindlora.training.{module}"), function)
    setattr(owner, name, by(getattr(owner, name)))


def for_all_devices(initialize: Callable[..., None]) -> Callable[..., None]:
    """Wraps MindFormers' function that makes process groups, so that it counts all devices in data parallel.

    Only the number of devices is corrected: the model keeps data_parallel 1, by which it reshapes its device's rows.
    """

    @functools.wraps(initialize)
    def initialize_model_parallel(**sizes: Any) -> None:
        if ms.get_auto_parallel_context("parallel_mode") == "data_parallel":
            sizes["data_parallel_size"] = get_group_size()
        initialize(**sizes)

    return initialize_model_parallel
