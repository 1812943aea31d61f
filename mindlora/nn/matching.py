"""Matches an adapter to the cells of a network: what mindlora.adapters.matching cannot tell without the cells."""

from typing import Dict, Optional, Tuple

from mindspore import nn

from mindlora.adapters import joined_pairs, matching
from mindlora.adapters.adapter import Adapter
from mindlora.adapters.matching import CellShape
from mindlora.adapters.pair_kinds import VARIANTS, Shape
from mindlora.common.text import listed
from mindlora.config import LoraConfig
from mindlora.errors import MissingTensorsError, RankMismatchError, ScaleMismatchError, UnexpectedTensorsError
from mindlora.models import names
from mindlora.nn.cell import LoRACell
from mindlora.nn.linear_form import channels_of
from mindlora.nn.experts import ExpertWeight, LoRAExpertWeight
from mindlora.nn.registry import adaptable_linear_types, kind_of

# A join or a split changes the last bits of lora_alpha.
_SCALE_TOLERANCE = 1e-12


class Match(matching.Match):
    """An adapter under the paths of a network's cells, with pairs joined or split like the cells of the network.

    Args:
        adapter (Adapter): Its paths are MindFormers' or the network's own; changed in place.
        network (nn.Cell): The network.
        cells (dict): The network's own adapter path -> a cell that has an adapter or can take one.
        source (str): Where the adapter comes from, for messages.

    Attributes:
        cells: As above; the rest as in mindlora.adapters.matching.Match.

    Raises:
        ShapeMismatchError, AdapterError, ScaleMismatchError: Pairs cannot be joined or split.
    """

    def __init__(self, adapter: Adapter, network: nn.Cell, cells: Dict[str, nn.Cell], source: str):
        self.cells = cells
        self._config = LoraConfig(use_dora=adapter.use_dora, use_vera=adapter.use_vera)
        super().__init__(adapter, cell_shapes(network, cells), source)

    def part_shapes(self, path: str) -> Dict[str, Shape]:
        cell = self.cells[path]
        kind = type(cell) if isinstance(cell, LoRACell) else kind_of(cell, self._config)
        return kind.part_shapes(cell, self.adapter.rank(path))

    def kind_of(self, path: str) -> str:
        return type(self.cells[path]).__name__

    def check_kind(self) -> None:
        """Raises MissingTensorsError or UnexpectedTensorsError if the two differ in use_dora or use_vera."""
        for kind in VARIANTS:
            field, part, trained = kind.field, kind.parts[0].name, self.adapter.kind is kind
            paths = [path for path in self.adapter.paths if path in self.cells]
            wrong = [path for path in paths if (part in self.cells[path].parts()) != trained]
            if wrong:
                raise (UnexpectedTensorsError if trained else MissingTensorsError)(
                    f"{self.source} was trained with {field} {trained}, but the network was built with {not trained}, "
                    f"at {listed(wrong)}: set {field} to {trained}."
                )

    def check_rank_and_scale(self) -> None:
        """Raises RankMismatchError or ScaleMismatchError if a LoRADense was built with another rank or scale."""
        adapter, paths = self.adapter, self.adapter.paths
        ranks = {path: (adapter.rank(path), self.cells[path].lora_rank) for path in paths}
        wrong = [path for path in paths if ranks[path][0] != ranks[path][1]]
        if wrong:
            found, built = ranks[wrong[0]]
            raise RankMismatchError(
                f"{self.source} has rank {found}, but the network was built with lora_rank {built}: set "
                f"lora_rank to {found}{_only(wrong, paths, 'rank_pattern')}."
            )
        scales = {path: (adapter.scale(path), self.cells[path].scale) for path in paths if path in adapter.alphas}
        wrong = [path for path, (found, built) in scales.items() if abs(found - built) > _SCALE_TOLERANCE * built]
        if wrong:
            cell = self.cells[wrong[0]]
            name, found, built = "lora_alpha", f"{adapter.alphas[wrong[0]]:g}", f"{cell.lora_alpha:g}"
            if adapter.use_rslora != cell.use_rslora:
                name, found, built = "use_rslora", str(adapter.use_rslora), str(cell.use_rslora)
            raise ScaleMismatchError(
                f"{self.source} was trained with {name} {found}, but the network was built with {built}: "
                f"set {name} to {found}{_only(wrong, paths, 'alpha_pattern')}, or its effect is "
                "scaled wrongly."
            )


def cell_shapes(network: nn.Cell, cells: Dict[str, nn.Cell]) -> Dict[str, CellShape]:
    """Returns what matching needs to know about cells of a network.

    Args:
        network (nn.Cell): The network.
        cells (dict): Adapter path -> a cell that has an adapter or can take one.

    Returns:
        dict, adapter path -> CellShape.
    """
    heads, linear = _head_sizes(network), adaptable_linear_types()
    return {
        path: CellShape(
            *channels_of(cell),
            *heads.get(id(cell), (None, None)),
            linear=isinstance(cell, linear),
            experts=isinstance(cell, (ExpertWeight, LoRAExpertWeight)),
        )
        for path, cell in cells.items()
    }


def split_joined(adapter: Adapter, network: nn.Cell, cells: Dict[str, nn.Cell]) -> None:
    """Splits the pairs of joined cells into pairs of their parts, by the network's head sizes there.

    Args:
        adapter (Adapter): The adapter of ``network``; changed in place.
        network (nn.Cell): The network.
        cells (dict): Adapter path -> cell.
    """
    heads = _head_sizes(network)
    for path in adapter.paths:
        if names.joined_parts(path):
            joined_pairs.split_pairs(adapter, path, *heads[id(cells[path])])


def _head_sizes(network) -> Dict[int, Tuple[Optional[int], Optional[int]]]:
    """Returns id of a cell -> (number of key-value heads, their size) of the attention that the cell belongs to."""
    sizes = {id(network): (None, None)}
    for _, parent in network.cells_and_names():
        kv_heads = getattr(parent, "n_kv_head", None) or getattr(parent, "kv_num_heads", None)
        found = kv_heads, getattr(parent, "head_dim", None)
        sizes.update({id(child): found for child in parent.cells()})
    return sizes


def _only(wrong, paths, field) -> str:
    """Returns the cells that a message is about as text, or nothing if it is about all of them."""
    return "" if len(wrong) == len(paths) else f" ({field}) for {listed(wrong)}"
