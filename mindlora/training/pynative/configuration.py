"""The adapter settings of a PyNative Trainer YAML: MindFormers' lora_config, and additions from pet_config."""

import importlib
import re
import sys
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from mindspore import nn
from mindspore.common.initializer import Normal

from mindlora.core.errors import ConfigError, LoraError, UnsupportedCellError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.core.numerics import initializers
from mindlora.core.text import listed
from mindlora.models.variants.registry import VARIANTS
from mindlora.network.pynative.experts import LEAVES
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.checks.pynative import processes_of_a_model
from mindlora.run.checks.pynative_adapter import check_agreement, merged, variant_of

require_mindformers("2.0")
from mindformers.pynative.config.config import LoraConfig as MindFormersLoraConfig  # noqa: E402
from mindformers.pynative.layers.linear import Linear  # noqa: E402
from mindformers.pynative.transformers.moe.experts import GroupedMLP  # noqa: E402

TRAINER = "mindformers.pynative.trainer.trainer"
_INITIAL = ("lora_init", "lora_a_init", "lora_b_init")
# Keys that need undivided weights, the complete model, or all tokens of a row.
_OF_WHOLE_MODELS = (
    *("lora_init", "adapter_path", "modules_to_save", "freeze_include", "freeze_exclude"),
    "alora_invocation_tokens",
)


def current_trainer() -> Any:
    """Returns the Trainer that is currently building a model or an optimizer, or training a step.

    MindFormers passes only lora_config, and under its own launcher, this module is imported only after the Trainer has
    read its YAML, so the Trainer must be found on the call stack.
    """
    kind = importlib.import_module(TRAINER).Trainer
    frame = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
        frame = frame.f_back
    raise LoraError("build_lora_model works while MindFormers' Trainer builds its model: call apply_lora instead.")


def division_of_model() -> int:
    """Returns the number of processes among which the current Trainer divides its model; 1 if undivided."""
    trainer = current_trainer()
    return processes_of_a_model(trainer.config.parallelism.to_dict(), trainer.world_size)


def refuse_division(found: str, advice: str = "") -> None:
    """Raises ConfigError if the current Trainer divides its model.

    Args:
        found (str): The feature that needs an undivided model.
        advice (str): An alternative remedy. Default: none.
    """
    divided = division_of_model()
    if divided > 1:
        raise ConfigError(
            f"{found}, which mindlora supports under MindFormers' PyNative Trainer where each process has the whole "
            f"model, and here {divided} processes divide it. Set parallelism.data_parallel_shard: 1, start one "
            f"process{advice}."
        )


def adapter_configuration(model: nn.Cell, lora_config: MindFormersLoraConfig, pet_config: Mapping) -> PetLoraConfig:
    """Returns the configuration of the adapters for ``model``, which has none yet.

    Settings missing in pet_config are taken from lora_config; target_modules is then the cells' paths.

    Args:
        model (nn.Cell): A PyNative model, or one of its pipeline stages.
        lora_config (LoraConfig): MindFormers' node.
        pet_config (Mapping): mindlora's node; it may be empty.

    Raises:
        ConfigError: A key is wrong, the nodes contradict each other, or a key is only for graph mode.
    """
    lora = lora_config.to_dict()
    given = merged(pet_config, lora, selected_paths(model, lora_config), _dtype_of_parameters(model))
    if "lora_a_init" not in variant_of(given).excludes:
        _fill_initial_values(given, lora_config)
    config = PetLoraConfig.from_pet_config(given)
    check_agreement(config, lora)
    for name in (*_OF_WHOLE_MODELS, *(variant.field for variant in VARIANTS if variant.allocates_ranks)):
        value = getattr(config, name)
        if initializers.computed_from_base(config.lora_init) if name == "lora_init" else value:
            refuse_division(f"pet_config.{name} is {value!r}", ", or remove it")
    return config


def check_same_cells(paths: Sequence[str], theirs: Sequence[str]) -> None:
    """Raises ConfigError unless pet_config and lora_config (``theirs``) select the same cells.

    MindFormers selects routed experts as one cell; pet_config may select one of their weights.
    """
    ours = list(map(_cell_of, paths))
    theirs = list(map(_cell_of, theirs))
    for extra, others, more, fewer in (
        (ours, theirs, "pet_config", "lora_config"),
        (theirs, ours, "lora_config", "pet_config"),
    ):
        missing = [path for path in extra if path not in others]
        if missing:
            raise ConfigError(
                f"pet_config and lora_config select different cells: {more} selects {listed(missing)}, and {fewer} "
                "does not. Remove target_modules and the like from pet_config, or make them agree."
            )


def selected_paths(model: nn.Cell, lora_config: MindFormersLoraConfig) -> List[str]:
    """Returns the paths of the cells that MindFormers' lora_config selects, by searching its regexes in each path.

    A match of exclude_layers in the path of a cell, or of an enclosing cell, excludes the cell. Routed experts are two
    paths, one for each weight.
    """
    target = re.compile(lora_config.target_modules)
    exclude = re.compile(lora_config.exclude_layers) if lora_config.exclude_layers else None
    paths: List[str] = []
    for path, cell in model.cells_and_names():
        matched = isinstance(cell, (Linear, GroupedMLP)) and target.search(path)
        if matched and not (exclude and any(map(exclude.search, _holders(path)))):
            paths += [f"{path}.{leaf}" for leaf in LEAVES] if isinstance(cell, GroupedMLP) else [path]
    return paths


def check_experts_are_whole(paths: Sequence[str], release: Tuple[int, int], processes: int) -> None:
    """Raises UnsupportedCellError if routed experts among ``paths`` get adapters that MindFormers would not shard."""
    experts = [path for path in paths if _cell_of(path) != path]
    if experts and release == (2, 0) and processes > 1:
        raise UnsupportedCellError(
            f"lora_config.target_modules selects the routed experts {listed(experts)}, whose adapters MindFormers 2.0 "
            f"does not shard, and this run has {processes} processes. Add them to lora_config.exclude_layers, or use "
            "MindFormers 2.1."
        )


def _cell_of(path: str) -> str:
    """Returns the path of the cell; for a weight of routed experts, the path of the experts."""
    cell, _, leaf = path.rpartition(".")
    return cell if leaf in LEAVES else path


def _holders(path: str) -> List[str]:
    """Returns a path and the paths of the enclosing cells."""
    parts = path.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _fill_initial_values(given: Dict[str, Any], lora_config: MindFormersLoraConfig) -> None:
    """Takes lora_config's standard deviations, unless pet_config sets the initial values of A and B."""
    fields = type(lora_config).__dataclass_fields__
    named = [name for name in _INITIAL if name in given]
    for name in ("lora_a_std", "lora_b_std"):
        if named and getattr(lora_config, name) != fields[name].default:
            raise ConfigError(
                f"pet_config.{named[0]} is {given[named[0]]!r} and lora_config.{name} is {getattr(lora_config, name)}: "
                "both set the initial values. Remove one of them."
            )
    if not named:
        given["lora_a_init"] = Normal(lora_config.lora_a_std)
        given["lora_b_init"] = Normal(lora_config.lora_b_std) if lora_config.lora_b_std > 0 else "zeros"


def _dtype_of_parameters(model: nn.Cell) -> str:
    """Returns the dtype of the base's linear cells: sharding groups parameters of one dtype."""
    linear = next(cell for _, cell in model.cells_and_names() if isinstance(cell, Linear))
    return str(linear.params_dtype).lower()
