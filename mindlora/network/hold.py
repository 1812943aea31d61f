"""hold_base: makes the linear cells of a network hold the integers of a quantized checkpoint, in place."""

import logging
from typing import Tuple

import mindspore as ms
from mindspore import nn

from mindlora.core.errors import ConfigError, UnsupportedCellError
from mindlora.core.text import listed
from mindlora.files.base.quantized.held import ADVICE
from mindlora.network.cells.linear_base import parallel_linear_types, plain_linear_types
from mindlora.network.cells.parallel_linear import IntegerParallelLinear
from mindlora.network.load_base import held_forms
from mindlora.network.quantized.quantized_dense import IntegerDense
from mindlora.network.tree import Tree, adapter_path, refusal, refusals, replace_in

logger = logging.getLogger("mindlora")


def hold_base(network: nn.Cell, path: str) -> Tuple[str, ...]:
    """Replaces each linear cell of ``network`` whose weight a checkpoint has in integers by IntegerDense.

    load_base then fills them with the file's own bits. Float weights are discarded. Apply LoRA afterwards.

    Args:
        network (nn.Cell): A model of MindFormers, or one for serving, in float; best built under
            mindspore.nn.utils.no_init_parameters.
        path (str): The checkpoint: a folder in a quantized form, such as GPTQ, AWQ or compressed-tensors.

    Returns:
        tuple of str, the paths of the cells.

    Raises:
        CheckpointError: The checkpoint holds no quantized weights, or one cannot be held in its own bits.
        ConfigError: The device is not a CPU.
        UnsupportedCellError: A cell with such a weight is of another kind, or sharded; all of them are listed.
        BackendError: The library of mindlora's CPU operators is missing.
    """
    if ms.get_context("device_target") != "CPU":
        raise ConfigError(
            f"quantize_base (--quantize-base) is as_stored, but the device is {ms.get_context('device_target')}, for "
            f"which no operator multiplies by integers. {ADVICE}"
        )
    tree = Tree(network)
    forms = held_forms(network, path)
    parallel = parallel_linear_types()
    types = (*plain_linear_types(), *parallel)
    cells = {}
    for at, cell in tree.cells.items():
        if at and isinstance(cell, types) and getattr(cell, "weight", None) is not None:
            prefix = adapter_path(cell, at)
            if f"{prefix}.weight" in forms:
                cells[prefix] = cell
    kinds = {
        prefix: IntegerParallelLinear if isinstance(cell, parallel) else IntegerDense for prefix, cell in cells.items()
    }
    refused = refusals({prefix: refusal(kinds[prefix].check, cell) for prefix, cell in cells.items()})
    missing = [name for name in forms if name.rpartition(".")[0] not in cells]
    if refused or missing:
        if missing:
            refused.append(f"no linear cell has the name of {listed(missing)}")
        raise UnsupportedCellError(
            f"quantize_base (--quantize-base) is as_stored, but cells cannot hold their weights so. "
            f"{'; '.join(refused)}. {ADVICE}"
        )
    made = {
        id(cell): kinds[prefix].from_dense(cell, prefix, forms[f"{prefix}.weight"]) for prefix, cell in cells.items()
    }
    replace_in(tree.modules.values(), made)
    logger.info("Held in the bits of %s: %d cells, %s.", path, len(cells), listed(cells))
    return tuple(cells)
