"""Puts LoRA on a network: match, replace, freeze, summarize."""

import dataclasses
import logging
from collections import Counter
from typing import Callable, Dict, List, Optional, Tuple

import numpy as np
from mindspore import nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import LoraError, UnsupportedCellError
from mindlora.core.text import listed
from mindlora.models.lora_config import AS_STORED, NF4, LoraConfig
from mindlora.models.trainable import freeze, select
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.routed_experts import holders_with
from mindlora.network.invocation import invocation_marker
from mindlora.network.quantize import quantize_with_adapters
from mindlora.network.quantized.nf4 import parameter_count
from mindlora.network.quantized.quantized_dense import IntegerDense
from mindlora.network.registry import describe, kind_of
from mindlora.network.tree import (
    Tree,
    is_saved_module,
    mark_saved_module,
    refusal,
    refusals,
    renew_recomputed_parameters,
    replace_in,
)

logger = logging.getLogger("mindlora")


@dataclasses.dataclass(frozen=True)
class LoraReport:
    """The result of apply_lora.

    Attributes:
        replaced (tuple of str): Paths of the cells that became LoRADense.
        trainable (int): Number of elements of all A and B that train, and of the saved modules (modules_to_save).
        total (int): Number of elements of all parameters, the adapters included.
    """

    replaced: Tuple[str, ...]
    trainable: int
    total: int


def apply_lora(network: nn.Cell, config: LoraConfig) -> LoraReport:
    """Replaces the linear cells that ``config`` selects by LoRADense, in place; freezes nothing (see freeze_base).

    With quantize_base nf4, all linear cells except output heads, and the stacked weights of routed experts, become
    4-bit first, whether they are selected or not. With as_stored, hold_base must have been called.

    Args:
        network (nn.Cell): Any network of nn.Dense, mint.nn.Linear or MindFormers' Linear cells.
        config (LoraConfig): target_modules or target_parameters must be set.

    Returns:
        LoraReport.

    Raises:
        LoraError: The network holds LoRADense cells already, or with as_stored no weight in integers.
        TargetError: target_modules selects nothing, names something that does not exist, or selects cells of a
            text-to-image pipeline that stay as they are (see mindlora.models.trainable).
        UnsupportedCellError: Selected cells cannot carry LoRA; all of them are listed and nothing is replaced.
        QuantizationError: The base cannot be quantized.
    """
    tree = Tree(network)
    present = list(tree.adapted())
    if present:
        raise LoraError(
            f"LoRA is on this network already, at {listed(present)}. Applying it again would reset "
            "what was trained: build a new network."
        )
    if config.quantize_base == AS_STORED and not any(isinstance(cell, IntegerDense) for cell in tree.modules.values()):
        raise LoraError(
            "quantize_base is as_stored, but no cell of the network holds integers. Call hold_base with the checkpoint "
            "before apply_lora."
        )
    tree.give_heads_their_tables()
    selection = select(describe(tree, config), config)
    paths = {path: cell.prefix for path, cell in selection.cells.items()}
    saved = [parameter for parameter in tree.parameters() if parameter.name in selection.saved]
    initial_parts: Dict[str, Dict[str, np.ndarray]] = {}
    if config.quantize_base == NF4:
        initial_parts = quantize_with_adapters(tree, config, selection.quantized, paths)
        tree = Tree(network)
    adapted = put_lora(tree, {prefix: tree.cells[path] for path, prefix in paths.items()}, config.for_cell)
    for prefix, parts in initial_parts.items():
        for part, array in parts.items():
            adapted[prefix].load_part(part, array)
    for parameter in saved:
        mark_saved_module(parameter)
    return LoraReport(tuple(paths), selection.trainable, parameter_count(network))


def put_lora(tree: Tree, cells: Dict[str, nn.Cell], config_of: Callable[[str], LoraConfig]) -> Dict[str, LoRACell]:
    """Replaces cells of a network, given by adapter path, by cells with an adapter, and returns these by path.

    ``config_of`` returns the configuration for a path. Raises UnsupportedCellError if cells cannot carry LoRA; all of
    them are listed and nothing is replaced.
    """
    configs = {path: config_of(path) for path in cells}
    kinds = {path: kind_of(cell, configs[path]) for path, cell in cells.items()}
    refused = refusals({path: refusal(kinds[path].check, cell, configs[path]) for path, cell in cells.items()})
    if refused:
        reasons = "; ".join(refused)
        raise UnsupportedCellError(f"LoRA cannot be put on {len(refused)} of the selected cells. {reasons}")
    adapted, shared = {}, {}
    for path, cell in cells.items():
        kind, config = kinds[path], configs[path]
        # Cells of one variant share, whatever their bases are.
        if kind.variant not in shared:
            sharing = [cells[other] for other in cells if kinds[other].variant is kind.variant]
            shared[kind.variant] = kind.shared_parameters(sharing, config)
        adapted[path] = kind.from_cell(cell, config, shared[kind.variant])
        adapted[path].name_parts(path)
    replacements: Dict[int, nn.Cell] = {id(cell): adapted[path] for path, cell in cells.items()}
    replacements.update(invocation_marker(tree.network, adapted))
    replacements.update(holders_with(tree.modules, [(cell, adapted[path]) for path, cell in cells.items()]))
    replace_in(tree.modules.values(), replacements)
    renew_recomputed_parameters(tree.modules.values())
    logger.info("LoRA put on %d cells: %s.", len(cells), listed(cells))
    # Some kinds of cells compute in only one way.
    choices = Counter(made.choice for made in adapted.values() if hasattr(made, "choice"))
    for choice, count in choices.items():
        logger.info("Path of lora_delta for %d cells: %s, %s.", count, choice.path, choice.reason)
    return adapted


def freeze_base(network: nn.Cell, config: Optional[LoraConfig] = None) -> None:
    """Freezes every parameter of ``network`` except A (frozen too with freeze_lora_a), B and the saved modules.

    Args:
        network (nn.Cell): A network with LoRADense cells.
        config (LoraConfig): Its freeze_exclude names more parameters to train (shell-style patterns on full parameter
            names), its freeze_include more parameters to freeze. A parameter that matches both is treated as if it
            matched neither. Default: None.

    Raises:
        LoraError: The network holds no LoRADense cell.
        TargetError: A pattern matches no parameter, or freeze_exclude one of a part that stays as it is.
    """
    tree = Tree(network)
    adapters = {id(p) for cell in tree.adapted().values() for p in cell.trained_parameters()}
    if not adapters:
        raise LoraError(
            "The network holds no LoRADense cell: freezing the base would leave nothing to train. "
            "Call apply_lora first."
        )
    parameters = tree.parameters()
    adapters |= {id(p) for p in parameters if is_saved_module(p)}
    quantized = [p.name for p in parameters if p.dtype == mstype.uint8]
    trains = freeze({p.name: id(p) in adapters for p in parameters}, quantized, config)
    for parameter in parameters:
        parameter.requires_grad = trains[parameter.name]
    renew_recomputed_parameters(tree.modules.values())
    extra = sorted(p.name for p in parameters if p.requires_grad and id(p) not in adapters)
    if extra:
        logger.warning(
            "Training %d base parameters besides LoRA (freeze_exclude): %s. A saved adapter holds only LoRA "
            "tensors and the modules of modules_to_save: name these there, or save them with "
            "mindspore.save_checkpoint.",
            len(extra),
            listed(extra),
        )


def trainable_summary(network: nn.Cell) -> str:
    """Returns a table of the trainable parameters: a line for each kind of cell, and the totals as PEFT prints them.

    Args:
        network (nn.Cell): Any network.

    Returns:
        str, the last line being "trainable params: N || all params: N || trainable%: P".
    """
    tree = Tree(network)
    cells = tree.adapted()
    by_kind: Dict[tuple, List[str]] = {}
    for path, cell in cells.items():
        shape = (cell.in_channels, cell.out_channels, cell.lora_rank, cell.lora_alpha)
        by_kind.setdefault((path.rpartition(".")[2],) + shape, []).append(path)
    lines = []
    if by_kind:
        rows = [("adapters on", "cells", "in x out", "rank", "alpha", "parameters")]
        for (_, in_channels, out_channels, rank, alpha), paths in by_kind.items():
            count = sum(p.size for path in paths for p in cells[path].trained_parameters())
            size = f"{in_channels} x {out_channels}"
            rows.append((listed(paths), str(len(paths)), size, str(rank), f"{alpha:g}", f"{count:,}"))
        first, *others = [max(map(len, column)) for column in zip(*rows)]
        for row in rows:
            lines.append("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]))
    total = parameter_count(network)
    trainable = sum(p.size for p in tree.parameters() if p.requires_grad)
    share = 100 * trainable / total if total else 0
    lines.append(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {share:.4f}")
    return "\n".join(lines)
