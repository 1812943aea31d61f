"""Cells in a network: the names of their parameters, and how one cell replaces another."""

import copy
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple

from mindspore import Generator, Parameter, Tensor, nn

from mindlora.core.errors import UnsupportedCellError
from mindlora.models.architectures.architecture import within_mcore
from mindlora.network.cells.cell import WEIGHTS, LoRACell
from mindlora.network.cells.linear_base import parallel_linear_types
from mindlora.network.cells.routed_experts import RoutedExperts, cells_and_weights


class Tree:
    """A network as found by one walk, for callers with several questions. It is outdated once cells are replaced.

    Attributes:
        network (nn.Cell): The network.
        modules (dict): Path -> cell, in MindSpore's list: a cell with two parents appears once.
        cells (dict): The same, with the stacked weights of routed experts as separate cells.
    """

    def __init__(self, network: nn.Cell):
        self.network = network
        self.modules: Dict[str, nn.Cell] = dict(network.cells_and_names())
        self.cells = cells_and_weights(self.modules)

    def parameters(self) -> List[Parameter]:
        """Returns the parameters of all cells. The tree does not keep them, since quantizing frees them one by one."""
        found: Dict[int, Parameter] = {}
        for cell in self.modules.values():
            found.update({id(p): p for _, p in cell.parameters_and_names(expand=False) if id(p) not in found})
        return list(found.values())

    def adapted(self) -> Dict[str, LoRACell]:
        """Returns the cells with an adapter, by adapter path (see lora_cells)."""
        return {cell.adapter_path: cell for cell in self.modules.values() if isinstance(cell, LoRACell)}

    def give_heads_their_tables(self) -> None:
        """Prepares tied output layers of mcore models for adapters: each gets the table of its embedding as its weight.

        Such a layer has no weight and gets the table at each call (tie_word_embeddings: True).
        """
        for model in self.modules.values():
            if not getattr(model, "share_embeddings_and_output_weights", False):
                continue
            head = model.output_layer
            if isinstance(head, parallel_linear_types()) and head.weight is None:
                head.weight = model.embedding.word_embeddings.weight


# Copies of the cells of a network that share its parameters, so that these are in memory once.


def copy_cells(network: nn.Cell, own: Optional[Mapping[int, Parameter]] = None) -> Tuple[nn.Cell, Dict[int, Any]]:
    """Returns a copy of all cells of ``network``, and {id of the original: its copy}.

    The copy has the parameters of ``network``, except those that ``own`` (id -> parameter) replaces.
    """
    copies: Dict[int, Any] = {id(parameter): parameter for parameter in network.get_parameters()}
    copies.update(own or {})
    for _, cell in network.cells_and_names():
        # MindSpore's hook for recompute() cannot be copied, and has no use without a gradient.
        recomputation = getattr(cell, "_recompute_cell", None)
        if recomputation is not None:
            copies[id(recomputation)] = None
        for value in vars(cell).values():
            # Parameters among them are hidden from MindSpore (mindlora.network.invocation). The random
            # numbers of a dropout come from one source, which cannot be copied.
            if isinstance(value, (Tensor, Generator)):
                copies.setdefault(id(value), value)
    copied = copy.deepcopy(network, copies)
    for _, cell in copied.cells_and_names():
        if isinstance(cell, RoutedExperts):
            # MindSpore rebuilds an operator's copy from the method of the original cell.
            cell.make_morph()
    return copied, copies


def weight_of(cell: nn.Cell) -> Optional[Parameter]:
    """Returns the base's weight of a cell that carries an adapter or can carry one; None if it has no own weight."""
    return next((getattr(cell, name) for name in WEIGHTS if hasattr(cell, name)), None)


def adapter_path(cell: nn.Cell, path: str) -> str:
    """Returns the prefix of a cell's parameters: its path, or a longer or a shorter one."""
    weight = weight_of(cell).name
    prefix, _, name = weight.rpartition(".")
    if name == path.rpartition(".")[2]:
        # A stacked weight of experts is a cell only for adapters, under the parameter's own name.
        prefix, name = weight, WEIGHTS[0]
    # MindFormers' mcore models leave the first part of the path, "model.", out of the names of their parameters.
    same = prefix == path or prefix.endswith("." + path) or ("." + path).endswith(".model." + prefix)
    # A head's weight may be the embedding's.
    return prefix if name in WEIGHTS and same else within_mcore(path)


def refusal(check: Callable[..., None], *arguments: object) -> str:
    """Returns why a check refuses a cell with an UnsupportedCellError, or "" if it does not."""
    try:
        check(*arguments)
    except UnsupportedCellError as error:
        return str(error)
    return ""


def refusals(reasons: Mapping[str, str]) -> List[str]:
    """Returns "path: reason" for each refused cell, from path -> result of ``refusal``."""
    return [f"{path}: {reason}" for path, reason in reasons.items() if reason]


def replace_children(network: nn.Cell, replacements: Dict[int, nn.Cell]) -> None:
    """Replaces cells of ``network`` wherever they are in it.

    ``replacements`` is id of the cell to replace -> its replacement.
    """
    replace_in([cell for _, cell in network.cells_and_names()], replacements)


def replace_in(parents: Iterable[nn.Cell], replacements: Dict[int, nn.Cell]) -> None:
    """Replaces cells wherever they occur in ``modules``, all cells of a network; as replace_children."""
    # Straight into _cells: assigning an attribute would rename the parameters of the frozen base.
    for parent in parents:
        # A graph compiled before would still run the replaced cells.
        parent.compile_cache.clear()
        hit = False
        for name, child in parent._cells.items():
            if id(child) in replacements:
                parent._cells[name] = replacements[id(child)]
                hit = True
        if hit and isinstance(parent, nn.SequentialCell):
            # Its forward runs over cell_list, not over _cells.
            parent.cell_list = list(parent._cells.values())


def renew_recomputed_parameters(cells: Iterable[nn.Cell]) -> None:
    """Renews, for all cells of a network that are recomputed in PyNative mode, the list of their trainable parameters.

    MindSpore lists them when ``recompute`` is called, and gives later parameters a gradient of zero.
    """
    for cell in cells:
        recomputation = getattr(cell, "_recompute_cell", None)
        if hasattr(recomputation, "internal_params"):
            recomputation.internal_params = cell.trainable_params()


_SAVED_MODULE = "mindlora_saved_module"


def lora_cells(network: nn.Cell) -> Iterator[Tuple[str, LoRACell]]:
    """Yields (adapter path, cell) for each cell with an adapter; the path is the prefix of its parameters."""
    for _, cell in network.cells_and_names():
        if isinstance(cell, LoRACell):
            yield cell.adapter_path, cell


def allocates_ranks(network: nn.Cell) -> bool:
    """Returns whether training decides which cells of a network keep how much of their ranks, as with AdaLoRA."""
    return any(cell.variant.allocates_ranks for _, cell in lora_cells(network))


def mark_saved_module(parameter: Parameter) -> None:
    """Marks a parameter of the base as belonging to modules_to_save: it trains, and is saved with the adapter."""
    setattr(parameter, _SAVED_MODULE, True)


def is_saved_module(parameter: Parameter) -> bool:
    """Returns whether mark_saved_module marked a parameter."""
    return getattr(parameter, _SAVED_MODULE, False)


def saved_module_parameters(network: nn.Cell) -> List[Parameter]:
    """Returns the parameters of the base that mark_saved_module marked."""
    return [p for p in network.get_parameters() if is_saved_module(p)]
