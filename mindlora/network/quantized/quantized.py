"""A cell with an adapter on a 4-bit weight, of whatever kind: its weight in float, and a sample of it."""

from typing import Tuple

import numpy as np

from mindlora.models.lora_config import LoraConfig
from mindlora.network.cells.cell import LoRACell, carry_settings
from mindlora.network.quantized.nf4 import first_rows
from mindlora.network.registry import kind_of


def in_float(cell: LoRACell) -> LoRACell:
    """Returns a cell with the same A and B on the plain cell with the dequantized weight (see NF4Dense.plain_cell)."""
    config = LoraConfig(
        lora_rank=cell.lora_rank,
        lora_alpha=cell.lora_alpha,
        lora_dropout=cell.dropout_rate,
        use_rslora=cell.use_rslora,
        compute_dtype=str(cell.dtype),
        freeze_lora_a=cell.freeze_lora_a,
    )
    plain = cell.base_cell.plain_cell()
    lora = kind_of(plain, config).from_cell(plain, config)
    for part, parameter in cell.parts().items():
        setattr(lora, lora.parameter_names[part], parameter)
    carry_settings(cell, lora)
    return lora


def sample(cell: LoRACell, rows: int) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the first ``rows`` rows of a quantized W and of what the adapter adds to them, float32 [rows, ...]."""
    weight = first_rows(cell, rows)
    # One pair of matrices, or one for each expert.
    left, right = (half.reshape(-1, *half.shape[-2:]) for half in cell.layout.factors(*cell.pair()))
    count = -(-len(weight) // left.shape[1])
    change = np.float32(cell.scale) * left[:count, : len(weight)].astype(np.float32) @ right[:count].astype(np.float32)
    return weight, change.reshape(-1, change.shape[-1])[: len(weight)]
