"""Cells in a network: how their parameters are called, and how one takes the place of another."""

from typing import Callable, Dict, Iterator, List, Tuple

from mindspore import Parameter, nn

from mindlora.errors import UnsupportedCellError
from mindlora.nn.cell import LoRACell

# How the weight of a cell is called: of most, of MindFormers' embeddings, of MindSpore's.
WEIGHTS = ("weight", "embedding_weight", "embedding_table")


def weight_of(cell: nn.Cell) -> Parameter:
    """Returns the base's weight of a cell that carries an adapter, or can carry one."""
    return next(getattr(cell, name) for name in WEIGHTS if hasattr(cell, name))


def adapter_path(cell: nn.Cell, path: str) -> str:
    """What stands before the names of a cell's parameters: its path, or more where the network has a prefix itself."""
    stem, _, leaf = weight_of(cell).name.rpartition(".")
    return stem if leaf in WEIGHTS and (stem == path or stem.endswith("." + path)) else path


def refusals(cells: Dict[str, nn.Cell], check: Callable[[str, nn.Cell], None]) -> List[str]:
    """Returns "path: reason" for each of the cells for which ``check`` raises UnsupportedCellError."""
    found = []
    for path, cell in cells.items():
        try:
            check(path, cell)
        except UnsupportedCellError as error:
            found.append(f"{path}: {error}")
    return found


def replace_children(network: nn.Cell, replacements: Dict[int, nn.Cell]) -> None:
    """Puts cells into the places of others, by the id of the cell to replace, wherever in ``network`` it hangs."""
    # Straight into _cells: assigning an attribute would rename the parameters of the frozen base.
    for _, parent in list(network.cells_and_names()):
        # A graph compiled before would go on running the plain cells.
        parent.compile_cache.clear()
        hit = False
        for name, child in parent._cells.items():
            if id(child) in replacements:
                parent._cells[name] = replacements[id(child)]
                hit = True
        if hit and isinstance(parent, nn.SequentialCell):
            # Its forward runs over this list of its own, not over _cells.
            parent.cell_list = list(parent._cells.values())


_SAVED_MODULE = "mindlora_saved_whole"


def lora_cells(network: nn.Cell) -> Iterator[Tuple[str, LoRACell]]:
    """Yields (adapter path, cell) for each cell with an adapter; the path stands before its parameters' own names."""
    for _, cell in network.cells_and_names():
        if isinstance(cell, LoRACell):
            yield cell.adapter_path, cell


def mark_saved_module(parameter) -> None:
    """Notes that a parameter of the base was trained whole, so that it is saved with the adapter."""
    setattr(parameter, _SAVED_MODULE, True)


def saved_module_parameters(network: nn.Cell) -> List:
    """Returns the parameters of the base that were trained whole and belong to the adapter (modules_to_save)."""
    return [p for p in network.get_parameters() if getattr(p, _SAVED_MODULE, False)]
