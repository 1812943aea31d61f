"""Checks of the base's weights before a step that changes them in place: merging, or an initialization."""

from typing import Dict, Type

from mindspore import nn

from mindlora.core.errors import LoraError
from mindlora.core.numerics.dtypes import ROUNDING
from mindlora.core.text import listed
from mindlora.network.cells.cell import LoRACell


def check_weights(network: nn.Cell, cells: Dict[str, LoRACell], error: Type[LoraError], step: str, advice: str) -> None:
    """Raises ``error`` if a step would change a weight without values, in an unsupported dtype, or of another cell too.

    ``cells`` is path -> cell whose weight changes; ``advice`` says what to do about a weight that another cell shares.
    """
    empty = [path or "the cell" for path, cell in cells.items() if cell.weight.has_init]
    if empty:
        raise error(f"The weights of {listed(empty)} have no values yet: load the base checkpoint before {step}.")
    for path, cell in cells.items():
        if str(cell.weight.dtype).lower() not in ROUNDING:
            raise error(
                f"The weight of {path or 'the cell'} is {cell.weight.dtype}: {step} needs float32, float16 or "
                "bfloat16. Load the base in one of these, or leave the cell out of target_modules."
            )
    owners = {id(cell.weight): (path, cell) for path, cell in cells.items()}
    for other_path, other in network.cells_and_names() if cells else ():
        for name, parameter in other.parameters_and_names(expand=False):
            path, owner = owners.get(id(parameter), ("", other))
            # The weight of an adapter's cell may belong to the cell around it.
            if owner is not other and owner not in other.cells():
                raise error(
                    f"{path} shares its weight with {other_path} ({name}), which {step} would change too. {advice}"
                )
