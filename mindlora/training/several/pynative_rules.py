"""pet_config.adapters in a YAML of the PyNative Trainer: the YAML of a run with each alone, and what is refused."""

import copy
import warnings
from typing import Any, Callable, Dict, Iterator, List, Mapping

from mindlora.core.errors import LoraError
from mindlora.core.text import listed, shown
from mindlora.core.yaml_file import value_at
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.checks.pynative_adapter import merged
from mindlora.training.several.rules import (
    OPTIMIZER,
    TrainedAdapter,
    by_adapter,
    check_files,
    check_kind,
    of_run_and_adapter,
    trained_adapters,
    write_to_own_folder,
)

KEY = "pet_config.adapters"
MODEL = "Qwen3ForCausalLM"
# Callbacks of mindlora that follow a run with one adapter.
OF_ONE_ADAPTER = (
    *("BaseCheck", "ReferenceCheck", "LoraInitialization", "AdapterHealth", "RankBudget", "SampleAnswers"),
    *("Forgetting", "ForgettingBudget"),
)
_OPTIMIZER_KEYS = ("type", "betas", "eps", "weight_decay", "weight_decay_include", "weight_decay_exclude")
# Keys that a run with several adapters does not carry out -> why.
_NOT_WITH_ADAPTERS = {
    "training.use_skip_step_on_nan": "each adapter skips such steps by itself",
    "model.calculate_per_token_loss": "each adapter has its own mean loss",
    "model.num_nextn_predict_layers": "a token further on has a loss that is not kept apart",
    "preference": "preferences are learned by one adapter",
}


def alone_in_pynative(configuration: Mapping[str, Any], adapter: TrainedAdapter, output: str) -> Dict[str, Any]:
    """Returns the YAML of a run with this adapter alone, which writes to a folder of its name in ``output``.

    Its pet_config may select fewer cells than lora_config.
    """
    alone = copy.deepcopy(dict(configuration))
    pet_config = {key: value for key, value in alone["pet_config"].items() if key != "adapters"}
    alone["pet_config"] = {**pet_config, **adapter.own}
    own = {key: value for key, value in adapter.own.items() if key in ("lora_rank", "lora_alpha")}
    alone["lora_config"] = {**alone["lora_config"], **own}
    if adapter.learning_rate is not None:
        alone["lr_scheduler"] = {**(alone.get("lr_scheduler") or {}), "learning_rate": adapter.learning_rate}
    if adapter.data is not None:
        alone["train_dataset"]["dataloader"]["dataset_files"] = adapter.data
    write_to_own_folder(alone.get("callbacks") or [], adapter.name, output)
    return alone


def check_of_each(config: Mapping[str, Any], check: Callable[[Mapping[str, Any]], Iterator[Finding]]) -> List[Finding]:
    """Returns what a check finds in a YAML; with adapters, in that of a run with each alone, as by_adapter says it."""
    if not value_at(config, KEY):
        return list(check(config))
    try:
        adapters = adapters_of(config)
    except LoraError:
        # check_pynative_adapters says what is wrong.
        return []
    return by_adapter({each.name: list(check(alone_in_pynative(config, each, ""))) for each in adapters})


def check_pynative_adapters(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each setting that keeps several adapters from training in one run of the PyNative Trainer.

    ``config`` is the content of a YAML whose lora_config has no mistakes.
    """
    types = [node.get("type") for node in config.get("callbacks") or [] if isinstance(node, Mapping)]
    if "EachAdapter" in types:
        found = "callbacks has EachAdapter, which mindlora adds to a run with pet_config.adapters."
        yield error("callbacks", found, "Remove it.")
    if value_at(config, KEY) is None:
        return
    try:
        adapters = adapters_of(config)
        yield from check_kind(PetLoraConfig.from_pet_config(_of_all(config)), adapters, "pet_config")
    except LoraError as refusal:
        yield error(KEY, str(refusal))
        return
    yield from check_files(adapters, KEY)
    yield from _check_data(config, adapters)
    yield from _check_run(config)
    alone = [name for name in types if name in OF_ONE_ADAPTER]
    if alone:
        found = f"callbacks has {listed(alone)}, for a run with one adapter, and pet_config has adapters."
        yield error("callbacks", found, f"Remove it; there are {', '.join(of_run_and_adapter())}.")


def adapters_of(config: Mapping[str, Any]) -> List[TrainedAdapter]:
    """Returns the adapters of a YAML; raises LoraError as trained_adapters does."""
    with warnings.catch_warnings():
        # They are given where the adapters are made.
        warnings.simplefilter("ignore")
        return trained_adapters(PetLoraConfig.from_pet_config(_of_all(config)))


def _of_all(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns pet_config with what lora_config says for all adapters."""
    # Which cells it is counts for nothing that is looked at here.
    return merged(config["pet_config"], config["lora_config"], ["all-linear"], "float32")


def _check_data(config: Mapping[str, Any], adapters: List[TrainedAdapter]) -> Iterator[Finding]:
    own = [adapter for adapter in adapters if adapter.data]
    if not own:
        return
    needed = (("train_dataset.dataloader.type", "MindDataset"), ("train_dataset.drop_remainder", True))
    for key, value in needed:
        # The Trainer leaves a remainder out where the YAML says nothing.
        if value_at(config, key) not in (value, None):
            yield error(
                key,
                f"{key} is {value_at(config, key)!r}, and {own[0].name} has data of its own, which is read as a "
                "MindRecord and in batches of equal size.",
                f"Set it to {value}.",
            )


def _check_run(config: Mapping[str, Any]) -> Iterator[Finding]:
    model = config.get("model") or {}
    classes = model.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else classes
    if name != MODEL:
        yield error(
            "model.architectures",
            f"The model is {name}, and several adapters train on {MODEL} alone under MindFormers' PyNative Trainer.",
            "Train one adapter at a time.",
        )
    optimizer = config.get("optimizer") or {}
    kind = optimizer.get("type", OPTIMIZER)
    if kind != OPTIMIZER:
        found = f"optimizer.type is {kind!r}, and pet_config has adapters: it is the optimizer that keeps them apart."
        yield error("optimizer.type", found, f"Set it to {OPTIMIZER}.")
    for key, value in optimizer.items():
        if key not in _OPTIMIZER_KEYS and value not in (None, False):
            yield error(
                f"optimizer.{key}",
                f"optimizer.{key} is {shown(value)}, which a run with several adapters does not carry out.",
                f"Remove it; there are {', '.join(_OPTIMIZER_KEYS)}.",
            )
    for key, reason in _NOT_WITH_ADAPTERS.items():
        value = value_at(config, key)
        if value:
            yield error(key, f"{key} is {shown(value)}, and pet_config has adapters: {reason}.", "Remove it.")
    if (model.get("chunk_loss_num") or 0) > 1:
        found = f"model.chunk_loss_num is {model['chunk_loss_num']}, and the loss of each adapter is computed at once."
        yield error("model.chunk_loss_num", found, "Remove it.")
