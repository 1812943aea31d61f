"""The adapter of a YAML of the PyNative trainer: lora_config, and pet_config's additions to it."""

import warnings
from typing import Any, Dict, Iterator, Mapping, Sequence, Tuple, Union

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.fields import COUNT
from mindlora.core.numerics import initializers
from mindlora.core.numerics.rank_schedule import BudgetSchedule
from mindlora.core.text import listed
from mindlora.core.yaml_file import value_at
from mindlora.models.label_losses import IN_PYNATIVE, KEY, check_loss_in_pieces
from mindlora.models.variants.registry import LORA, VARIANTS
from mindlora.models.variants.variant import Variant
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.pet_config import PetLoraConfig

# The features of a YAML that MindFormers' PyNative Trainer supports; graph mode's others are refused by name.

# Callbacks that need features of graph mode alone.
GRAPH_MODE_ALONE = ("BaseWeights", "AdapterSlices", "ExchangeCheck")
# Nodes of a graph-mode YAML -> the PyNative Trainer's counterpart. It ignores unknown nodes.
_GRAPH_MODE_NODES = {
    "runner_wrapper": "the Trainer builds its own train step",
    "runner_config": "use training, with steps, local_batch_size and global_batch_size",
    "lr_schedule": "use lr_scheduler",
    "load_checkpoint": "use checkpoint.load_path",
    "train_dataset_task": "use train_dataset.dataloader",
    "parallel": "use parallelism",
    "parallel_config": "use parallelism",
    "resume_training": "use checkpoint.load_path and checkpoint.no_load_optim: False",
}
_HERE = "which mindlora does not support under MindFormers' PyNative Trainer."
_IN_GRAPH_MODE = "Remove it, or train in graph mode."


def check_graph_mode(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each node and callback of graph mode alone in a YAML of the PyNative trainer."""
    for name, instead in _GRAPH_MODE_NODES.items():
        if config.get(name):
            found = f"The YAML has {name}, which MindFormers' PyNative Trainer does not read."
            yield error(name, found, f"Remove it: {instead}.")
    nodes = config.get("callbacks") or []
    types = [node.get("type") for node in nodes if isinstance(node, Mapping)]
    refused = [name for name in types if name in GRAPH_MODE_ALONE]
    if refused:
        yield error("callbacks", f"callbacks has {listed(refused)}, {_HERE}", _IN_GRAPH_MODE)


def check_adapter(config: Mapping[str, Any], paths: Sequence[str], cells: int) -> Iterator[Finding]:
    """Yields faults of the adapter that lora_config and pet_config describe together.

    Args:
        config (mapping): The content of the YAML, whose lora_config has no mistakes.
        paths (sequence of str): As in merged; empty if they are unknown.
        cells (int): Number of cells that get an adapter; 0 if it is unknown.
    """
    lora_config = config["lora_config"]
    given = config.get("pet_config") or {}
    try:
        with warnings.catch_warnings():
            # They are passed where the adapter is built.
            warnings.simplefilter("ignore")
            # The checks here do not depend on which cells these are.
            adapter = PetLoraConfig.from_pet_config(merged(given, lora_config, paths or ["all-linear"], "float32"))
        yield from _check_supported(adapter)
        check_agreement(adapter, lora_config)
        check_loss_in_pieces(loss_in_pieces(config))
        steps = value_at(config, "training.steps")
        if adapter.variant.allocates_ranks and steps in COUNT:
            BudgetSchedule(adapter.budget_settings, max(cells, 1), steps)
    except LoraError as refusal:
        yield error("pet_config", str(refusal))


def _check_supported(config: PetLoraConfig) -> Iterator[Finding]:
    init, path = config.lora_init, config.adapter_path
    if initializers.is_loftq(init):
        yield error("pet_config.lora_init", f"pet_config.lora_init is {init!r}, {_HERE}", _IN_GRAPH_MODE)
    if initializers.changes_base(init) and path:
        yield error(
            "pet_config.lora_init",
            f"pet_config.lora_init is {init!r} and pet_config.adapter_path is {path!r}: both say how A and B begin.",
            "Remove lora_init, and set lora_rank and lora_alpha of lora_config to those of the adapter.",
        )
    field = config.variant.field
    if config.variant.allocates_ranks and path:
        yield error(
            f"pet_config.{field}",
            f"pet_config.{field} is True and pet_config.adapter_path is {path!r}: the ranks of a saved adapter are "
            "fixed.",
            f"Remove {field}, and set lora_rank and rank_pattern to those of the adapter.",
        )


def loss_in_pieces(config: Mapping[str, Any]) -> Union[bool, int]:
    """Returns pet_config.loss_in_pieces of a YAML of the PyNative trainer; True by default."""
    setting = value_at(config, IN_PYNATIVE)
    return True if setting is None else setting


# The adapter that both nodes describe.

# Fields of both nodes. MindFormers reads only lora_config, and writes it beside the checkpoints of adapters.
_SHARED = {"lora_rank": 8, "lora_alpha": 16, "lora_dropout": 0.0}


def variant_of(pet_config: Mapping[str, Any]) -> Variant:
    """Returns the variant that pet_config selects."""
    return next((variant for variant in VARIANTS if pet_config.get(variant.field)), LORA)


def merged(
    pet_config: Mapping[str, Any], lora_config: Mapping[str, Any], paths: Sequence[str], dtype: str
) -> Dict[str, Any]:
    """Returns the keys of pet_config, completed from lora_config.

    Args:
        pet_config (mapping): mindlora's node; it may be empty.
        lora_config (mapping): MindFormers' node.
        paths (sequence of str): Paths of the cells and weights of experts that lora_config selects.
        dtype (str): The dtype of the base's linear cells.
    """
    # Settings of the loss do not belong to the adapter.
    given = {key: value for key, value in pet_config.items() if value is not None and key != KEY}
    variant = variant_of(given)
    if "preset" not in given:
        for name, theirs in _shared_fields(variant):
            given.setdefault(name, lora_config.get(theirs, _SHARED[theirs]))
        if "target_parameters" in given:
            # It names the adapted weights of the experts.
            paths = [path for path in paths if not path.endswith((".weight1", ".weight2"))]
        if paths:
            given.setdefault("target_modules", list(paths))
    given.setdefault("param_init_type", variant.pynative_dtype or dtype)
    return given


def check_agreement(config: PetLoraConfig, lora_config: Mapping[str, Any]) -> None:
    """Raises ConfigError if pet_config and lora_config in ``config`` contradict each other."""
    for name, theirs in _shared_fields(config.variant):
        other = lora_config.get(theirs, _SHARED[theirs])
        if getattr(config, name) != other:
            raise ConfigError(
                f"pet_config.{name} is {getattr(config, name)!r} and lora_config.{theirs} is {other!r}: MindFormers "
                "saves lora_config with the adapter. Write the same into both, or remove it from pet_config."
            )


def _shared_fields(variant: Variant) -> Sequence[Tuple[str, str]]:
    """Returns (field of pet_config, the same field of lora_config) for the settings of both nodes."""
    fields = {name: name for name in _SHARED if not (name == "lora_alpha" and variant.no_scale)}
    if variant.allocates_ranks:
        fields["init_r"] = fields.pop("lora_rank")
    return tuple(fields.items())
