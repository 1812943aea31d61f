"""Matches an adapter to the cells of a network: paths, joined cells, and checks that the two belong together."""

import logging
from typing import Dict, List, Optional, Tuple

from mindspore import nn

from mindlora.adapters import joined_pairs
from mindlora.adapters.adapter import Adapter, listed_parts, name_of
from mindlora.adapters.pair_kinds import VARIANTS
from mindlora.common.text import listed
from mindlora.config import LoraConfig
from mindlora.errors import (
    MissingTensorsError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
    UnexpectedTensorsError,
)
from mindlora.models import names
from mindlora.nn.cell import LoRACell
from mindlora.nn.registry import kind_of

logger = logging.getLogger("mindlora")

# A join or a split changes the last bits of lora_alpha.
_SCALE_TOLERANCE = 1e-12


class Match:
    """An adapter under the paths of a network's cells, with pairs joined or split like the cells of the network.

    Args:
        adapter (Adapter): Its paths are MindFormers' or the network's own; changed in place.
        network (nn.Cell): The network.
        cells (dict): The network's own adapter path -> a cell that has an adapter or can take one.
        source (str): Where the adapter comes from, for messages.

    Attributes:
        adapter, cells, source: As above.
        relaid (bool): Whether pairs were joined or split.

    Raises:
        ShapeMismatchError, AdapterError, ScaleMismatchError: Pairs cannot be joined or split.
    """

    def __init__(self, adapter: Adapter, network: nn.Cell, cells: Dict[str, nn.Cell], source: str):
        self.adapter, self.cells, self.source = adapter, cells, source
        own = {names.to_mindformers(path): path for path in cells}
        _rename(adapter, {path: names.to_mindformers(path) for path in adapter.paths})
        heads, present, self.relaid = _head_sizes(network), set(adapter.paths), False
        for path in own:
            if path not in present and any(part in present for part in names.joined_parts(path)):
                cell = cells[own[path]]
                joined_pairs.join_pairs(adapter, path, cell.out_channels, heads[id(cell)][0])
                self.relaid = True
        for path in present - set(own):
            parts = names.joined_parts(path)
            if parts and all(part in own for part in parts):
                joined_pairs.split_pairs(adapter, path, *heads[id(cells[own[parts[0]]])])
                self.relaid = True
        _rename(adapter, own)
        for path in adapter.paths:
            if path in cells:
                # An embedding has no in_channels, and no VeRA either.
                adapter.narrow(path, getattr(cells[path], "in_channels", None))

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

    def check_names(self, expected: List[str], strict: bool) -> None:
        """Raises UnexpectedTensorsError or MissingTensorsError if adapter and network hold different tensors.

        Args:
            expected (list of str): Paths of cells that must have a pair.
            strict (bool): With False, differences only give a warning, and pairs without a cell are dropped.
        """
        tensors, problems = self.adapter.tensors, []
        unexpected = [key for key in tensors if key[0] not in self.cells]
        missing = [(path, half) for path in expected for half in "AB" if (path, half) not in tensors]
        if unexpected:
            message = (
                f"{self.source} holds {len(unexpected)} LoRA tensors that the network has no place for: "
                f"{listed_parts(unexpected)}. Check target_modules."
            )
            problems.append((UnexpectedTensorsError, message))
        if missing:
            message = (
                f"{self.source} lacks {len(missing)} LoRA tensors of the network: {listed_parts(missing)}. "
                "Check target_modules."
            )
            problems.append((MissingTensorsError, message))
        if strict and problems:
            # One error names both kinds, which are usually two sides of one mistake.
            raise problems[-1][0](" ".join(message for _, message in problems))
        for _, message in problems:
            logger.warning("%s Loading the rest, as strict is False.", message)
        for key in unexpected:
            del tensors[key]
        if not tensors:
            raise MissingTensorsError(f"{self.source} shares no LoRA tensor with the network. {problems[0][1]}")

    def check_shapes(self) -> None:
        """Raises ShapeMismatchError if a tensor does not have the shape that its cell needs."""
        wrong, config = [], LoraConfig(use_dora=self.adapter.use_dora, use_vera=self.adapter.use_vera)
        for key, array in self.adapter.tensors.items():
            path, part = key
            cell = self.cells[path]
            kind = type(cell) if isinstance(cell, LoRACell) else kind_of(cell, config)
            needed = kind.part_shapes(cell, self.adapter.rank(path)).get(part)
            if needed is None:
                wrong.append(
                    f"{name_of(key)} is {list(array.shape)}, and the network's {type(cell).__name__} takes none"
                )
            elif array.shape != needed:
                wrong.append(f"{name_of(key)} is {list(array.shape)}, the network's is {list(needed)}")
        if wrong:
            raise ShapeMismatchError(
                f"{self.source}: {len(wrong)} tensors have another shape: {'; '.join(wrong)}. Load it into the model "
                "it was trained on."
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
        found = getattr(parent, "n_kv_head", None), getattr(parent, "head_dim", None)
        sizes.update({id(child): found for child in parent.cells()})
    return sizes


def _only(wrong, paths, field) -> str:
    """Returns the cells that a message is about as text, or nothing if it is about all of them."""
    return "" if len(wrong) == len(paths) else f" ({field}) for {listed(wrong)}"


def _rename(adapter, new_paths):
    adapter.tensors = {(new_paths.get(path, path), part): array for (path, part), array in adapter.tensors.items()}
    adapter.alphas = {new_paths.get(path, path): alpha for path, alpha in adapter.alphas.items()}
    adapter.embeddings = {new_paths.get(path, path) for path in adapter.embeddings}
