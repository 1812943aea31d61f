"""quantize_base: turns the linear cells and routed experts of a network into 4-bit NormalFloat, in place."""

import logging
from typing import Callable, Dict, Iterable, Optional, Tuple

import numpy as np
from mindspore import nn

from mindlora.core.errors import LoraError, QuantizationError, UnsupportedCellError
from mindlora.core.numerics import initializers
from mindlora.core.numerics.nf4 import Nf4Array, dequantize, quantize
from mindlora.core.text import listed
from mindlora.files.adapters.adapter import is_finite
from mindlora.models.lora_config import LoraConfig, Patterns
from mindlora.models.target_modules import select_quantized
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.experts import ExpertWeight
from mindlora.network.cells.linear_base import parallel_linear_types, plain_linear_types, pynative_linear_types
from mindlora.network.cells.routed_experts import holders_with
from mindlora.network.pynative.nf4 import NF4PyNativeExpertWeight
from mindlora.network.quantized.nf4 import NF4ExpertWeight, as_float32, has_values
from mindlora.network.quantized.quantized_dense import QuantizedDense
from mindlora.network.registry import nf4_type_of
from mindlora.network.tree import Tree, adapter_path, refusal, refusals, replace_in

logger = logging.getLogger("mindlora")

_QUANTIZED_TYPES = (QuantizedDense, NF4ExpertWeight, NF4PyNativeExpertWeight)
_OTHER_TYPES = (LoRACell, QuantizedDense, ExpertWeight)


def quantize_base(network: nn.Cell, exclude: Patterns = None) -> Tuple[str, ...]:
    """Replaces the linear cells of ``network`` by NF4Dense, in place, one after another: 4.13 bits per weight.

    The stacked weights of routed experts in MindFormers' mcore models become NF4ExpertWeight in the same way. Float
    weights are discarded. Cells that are quantized already stay as they are. Apply LoRA afterwards; with
    LoraConfig(quantize_base="nf4") apply_lora does both.

    Args:
        network (nn.Cell): A network of nn.Dense, mint.nn.Linear or MindFormers' Linear cells. If its weights have no
            values yet, afterwards load a checkpoint written by ``mindlora base quantize``.
        exclude (str or list of str): Cells to leave as they are, in addition to output heads (lm_head), given in the
            same way as target_modules (see LoraConfig). Default: None.

    Returns:
        tuple of str, the paths of the cells that were quantized.

    Raises:
        TargetError: ``exclude`` matches nothing, or leaves nothing to quantize.
        UnsupportedCellError: Cells cannot be quantized; all of them are listed.
        QuantizationError: A weight holds NaN or infinity. After any error the network is unchanged.

    Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023.
    """
    linear = {}
    types = (*plain_linear_types(), *parallel_linear_types(), *pynative_linear_types(), *_OTHER_TYPES)
    tree = Tree(network)
    for path, cell in tree.cells.items():
        if path and isinstance(cell, types):
            linear[path] = cell
    selected = select_quantized(list(linear), exclude)
    cells = {path: linear[path] for path in selected if not isinstance(linear[path], _QUANTIZED_TYPES)}
    refused = refusals({path: refusal(nf4_type_of(cell).check, cell) for path, cell in cells.items()})
    if refused:
        raise UnsupportedCellError(
            f"{len(refused)} of the linear cells cannot be quantized; leave them out with "
            f"quantize_exclude. {'; '.join(refused)}"
        )
    _check_finite(cells)
    _replace(tree, cells)
    return tuple(cells)


def _check_finite(cells: Dict[str, nn.Cell]) -> None:
    # Before the first weight is discarded.
    bad = [path for path, cell in cells.items() if has_values(cell.weight) and not is_finite(as_float32(cell.weight))]
    if bad:
        raise QuantizationError(
            f"The weights of {listed(bad)} hold NaN or infinity: the base cannot be quantized. Load it again."
        )


def _replace(
    tree: Tree, cells: Dict[str, nn.Cell], array_of: Optional[Callable[[str, nn.Cell], Optional[Nf4Array]]] = None
) -> None:
    """Replaces cells by quantized ones; ``array_of`` returns a cell's quantized weight, or None to quantize it here."""
    quantized = {
        path: nf4_type_of(cell).from_dense(cell, adapter_path(cell, path), array_of and array_of(path, cell))
        for path, cell in cells.items()
    }
    replacements = {id(cell): quantized[path] for path, cell in cells.items()}
    replacements.update(holders_with(tree.modules, ((cell, quantized[path]) for path, cell in cells.items())))
    replace_in(tree.modules.values(), replacements)
    logger.info("Quantized to NF4: %d cells, %s.", len(cells), listed(cells))


def quantize_with_adapters(
    tree: Tree, config: LoraConfig, paths: Iterable[str], adapted: Dict[str, str]
) -> Dict[str, Dict[str, np.ndarray]]:
    """Quantizes the base before apply_lora puts adapters on it; returns LoftQ's prefix -> part -> initial value, or {}.

    ``paths`` are the cells that quantize_base quantizes, ``adapted`` maps path to prefix of the cells that get
    adapters. Raises QuantizationError if a weight holds NaN or infinity, and LoraError if LoftQ has no weights to start
    from; after any error the network is unchanged.
    """
    initial_parts: Dict[str, Dict[str, np.ndarray]] = {}
    cells = {path: tree.cells[path] for path in paths}
    _check_finite(cells)
    if not initializers.is_loftq(config.lora_init):
        _replace(tree, cells)
        return initial_parts
    empty = [path for path in adapted if path in cells and not has_values(cells[path].weight)]
    if empty:
        raise LoraError(
            f"lora_init {config.lora_init!r} is computed from the base's weights in float, which have no "
            f"values at {listed(empty)}. Load them before apply_lora; for a YAML, make the adapter with mindlora "
            "base quantize --loftq and name it in adapter_path."
        )

    def array_of(path: str, cell: nn.Cell) -> Optional[Nf4Array]:
        if path not in adapted:
            return None
        array, initial_parts[adapted[path]] = _loftq(cell, config.for_cell(adapted[path]))
        return array

    _replace(tree, cells, array_of)
    return initial_parts


def _loftq(cell, config) -> Tuple[Nf4Array, Dict[str, np.ndarray]]:
    """Returns the quantized weight of a cell, and the A and B that compensate for its quantization error."""
    weight = as_float32(cell.weight).astype(np.float32, copy=False)
    iterations = initializers.loftq_iterations(config.lora_init)
    array, a, b = initializers.loftq(weight, config.lora_rank, quantize, dequantize, iterations, config.scale)
    return array, {"A": a, "B": b}
