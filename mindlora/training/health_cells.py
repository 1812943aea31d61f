"""What AdapterHealth measures, read from the cells of a network."""

import math
from typing import Dict, Mapping, Optional

import numpy as np

from mindlora.nn.cell import LoRACell
from mindlora.nn.nf4 import matrix_shape
from mindlora.nn.tensors import to_array
from mindlora.numerics.dtypes import to_float32
from mindlora.numerics.pair_layouts import has_product, layout_of
from mindlora.training.health_measures import CellValues, change_factors

# Rows of W from which |W| is estimated, so that a large base is not read as a whole.
_SAMPLED_ROWS = 256


def cell_values(
    cell: LoRACell,
    norm_of_weight: Optional[float],
    before: Mapping[str, np.ndarray],
    gradient_norms: Mapping[str, float],
) -> CellValues:
    """Returns what is measured on a cell.

    Args:
        cell (LoRACell): The cell.
        norm_of_weight (float or None): What weight_norm returned for it.
        before (mapping): Name of the part -> its values before the last step; empty if they are not known.
        gradient_norms (mapping): Name of a parameter -> norm of its gradient; empty if they are not known.
    """
    parts, factors, rank = float_parts(cell), None, cell.lora_rank
    if "lambda" in parts:
        # AdaLoRA's: what it has masked is no rank.
        kept = np.flatnonzero(parts["lambda"])
        a, b, rank = parts["lambda"][kept, None] * parts["A"][kept], parts["B"][:, kept], len(kept)
        factors = change_factors(a, b) if rank else None
    elif "A" in parts and has_product(parts["A"], parts["B"]) and not layout_of(parts["A"].shape).stacked:
        factors = change_factors(parts["A"], parts["B"], _initial_pair(cell))
    return CellValues(
        rank=rank,
        parts=parts,
        # Merging sets the B of an embedding to zero, but training starts with an A of zeros.
        zero_part="A" if cell.embeds else cell.zero_part,
        factors=factors,
        scale=cell.scale,
        weight_norm=norm_of_weight,
        before=dict(before),
        gradient_norms={name: gradient_norms[p.name] for name, p in cell.parts().items() if p.name in gradient_norms},
    )


def float_parts(cell: LoRACell, trained: bool = False) -> Dict[str, np.ndarray]:
    """Returns the parts of a cell's adapter as float32 arrays, which may share memory with the parameters.

    Args:
        cell (LoRACell): The cell.
        trained (bool): Whether to return only those that train. Default: False.
    """
    return {
        name: to_float32(to_array(parameter))
        for name, parameter in cell.parts().items()
        if parameter.requires_grad or not trained
    }


def weight_norm(cell: LoRACell) -> Optional[float]:
    """Returns |W| of the base, estimated from at most 256 rows of W: the first ones of a quantized W, or evenly spread.

    Args:
        cell (LoRACell): A cell whose weight has values.
    """
    if cell.quantization:
        rows, count = cell.sample(_SAMPLED_ROWS)[0], matrix_shape(cell)[0]
    else:
        weight = to_array(cell.weight)
        count = len(weight)
        chosen = np.linspace(0, count - 1, min(_SAMPLED_ROWS, count)).astype(int)
        rows = to_float32(weight[chosen])
        if cell.initial_pair:
            # The base is W before this product was subtracted from it.
            a, b = _initial_pair(cell)
            rows = rows + np.float32(cell.scale) * b[chosen] @ a
    norm = float(np.linalg.norm(rows)) * math.sqrt(count / len(rows))
    return norm if math.isfinite(norm) else None


def _initial_pair(cell):
    pair = cell.initial_pair
    return None if pair is None else (to_float32(pair.a), to_float32(pair.b))
