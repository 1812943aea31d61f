"""Checkpoints that MindFormers' PyNative Trainer loads: whether they are there, and whether they are complete.

MindFormers goes on without them, on random weights, and says so in its log.
"""

import os
from typing import Any, List, Mapping

from mindspore import nn

from mindlora.common.text import listed
from mindlora.errors import CheckpointError, ConfigError
from mindlora.models import names
from mindlora.nn.tree import lora_cells
from mindlora.plugin.log import logger


def check_paths(checkpoint: Any) -> None:
    """Raises ConfigError if a folder that MindFormers' node checkpoint names to load from is not there, or empty."""
    given = {key: getattr(checkpoint, key, "") for key in ("load_path", "base_load_path")}
    for key, path in given.items():
        if path and not (os.path.isfile(path) or os.path.isdir(path) and os.listdir(path)):
            found = "is an empty folder" if os.path.isdir(path) else "does not exist"
            raise ConfigError(
                f"checkpoint.{key} {path} {found}, and MindFormers would train on random weights. Name the folder of a "
                "checkpoint."
            )
    if not any(given.values()):
        logger.warning(
            "checkpoint.load_path is not set: the adapters are trained on random weights. Set it to the folder of the "
            "base, unless this is a test."
        )


def check_loaded(network: nn.Cell, loaded: Mapping[str, Any]) -> None:
    """Checks that a checkpoint has all of the base, all of the adapters, or both, of a network with adapters.

    Args:
        network (nn.Cell): What MindFormers loads into; one without adapters is not checked.
        loaded (mapping): Name -> value of each parameter that the checkpoint has.

    Raises:
        CheckpointError: It has a part of the base or of the adapters, or adapters of cells that have none here.
    """
    adapters = {parameter.name for _, cell in lora_cells(network) for parameter in cell.lora_parameters()}
    if not adapters:
        return
    base = {
        parameter.name
        for parameter in network.get_parameters()
        if parameter.name not in adapters and not names.is_computed(parameter.name)
    }
    for kind, expected in (("base", base), ("adapters", adapters)):
        missing = sorted(expected - set(loaded))
        if missing and len(missing) < len(expected):
            raise CheckpointError(
                f"The checkpoint has only a part of the {kind}; these are missing: {listed(missing)}. Load the "
                "checkpoint of the same model, with adapters on the same cells."
            )
    if not (base | adapters) & set(loaded):
        raise CheckpointError(
            f"The checkpoint has no parameter of this model, but {listed(sorted(loaded)) or 'nothing'}. Load one of "
            "the same model."
        )
    extra = _adapters_of_other_cells(loaded, adapters)
    if extra:
        raise CheckpointError(
            f"The checkpoint has adapters on cells that have none here: {listed(extra)}. Make target_modules select "
            "them too."
        )


def _adapters_of_other_cells(loaded: Mapping[str, Any], adapters: set) -> List[str]:
    return sorted(name for name in loaded if name.endswith(("lora_a", "lora_b")) and name not in adapters)
