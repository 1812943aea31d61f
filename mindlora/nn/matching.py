"""Fits an adapter to the cells of a network: names, concatenated cells, and checks that everything has its place."""

import logging
from typing import Dict, List, NamedTuple, Optional

from mindspore import nn

from mindlora.adapters import joined_pairs
from mindlora.adapters.adapter import Adapter, listed_parts, name_of
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


class MatchedCell(NamedTuple):
    """Where a pair can go.

    Attributes:
        cell (nn.Cell): A linear cell, or a LoRADense.
        kv_heads (int): n_kv_heads of the attention that the cell is part of, or None.
        head_dim (int): Size of that attention's heads, or None.
    """

    cell: nn.Cell
    kv_heads: Optional[int]
    head_dim: Optional[int]


def matched_cells(network: nn.Cell, cells: Dict[str, nn.Cell]) -> Dict[str, MatchedCell]:
    """Returns the places of ``cells``, which are by adapter path, in ``network``."""
    parents = {id(child): parent for _, parent in network.cells_and_names() for child in parent.cells()}
    return {
        path: MatchedCell(
            cell, getattr(parents.get(id(cell)), "n_kv_head", None), getattr(parents.get(id(cell)), "head_dim", None)
        )
        for path, cell in cells.items()
    }


def match_to(adapter: Adapter, places: Dict[str, MatchedCell]) -> bool:
    """Renames the pairs of ``adapter``, and joins or splits those of concatenated cells, as the network has them.

    Args:
        adapter (Adapter): Its paths are MindFormers' or the network's own; changed in place.
        places (dict): The network's own path -> MatchedCell.

    Returns:
        bool, whether pairs were joined or split.

    Raises:
        ShapeMismatchError, AdapterError, ScaleMismatchError: Pairs cannot be joined or split.
    """
    own = {names.to_mindformers(path): path for path in places}
    _rename(adapter, {path: names.to_mindformers(path) for path in adapter.paths})
    present, relaid = set(adapter.paths), False
    for path in own:
        if path not in present and any(part in present for part in names.joined_parts(path)):
            place = places[own[path]]
            joined_pairs.join_pairs(adapter, path, place.cell.out_channels, place.kv_heads)
            relaid = True
    for path in present - set(own):
        parts = names.joined_parts(path)
        if parts and all(part in own for part in parts):
            place = places[own[parts[0]]]
            joined_pairs.split_pairs(adapter, path, place.kv_heads, place.head_dim)
            relaid = True
    _rename(adapter, own)
    for path in adapter.paths:
        if path in places:
            # An embedding has none, and no VeRA either.
            adapter.narrow(path, getattr(places[path].cell, "in_channels", None))
    return relaid


def split_joined(adapter: Adapter, places: Dict[str, MatchedCell]) -> None:
    """Splits every pair of a concatenated cell into those of its parts, with the head sizes of its place."""
    for path in adapter.paths:
        if names.joined_parts(path):
            joined_pairs.split_pairs(adapter, path, places[path].kv_heads, places[path].head_dim)


def check_names(
    adapter: Adapter, expected: List[str], places: Dict[str, MatchedCell], source: str, strict: bool
) -> None:
    """Raises UnexpectedTensorsError or MissingTensorsError where file and network differ, or warns and drops.

    Args:
        adapter (Adapter): Fitted; with ``strict`` False, pairs without a place are taken out of it.
        expected (list of str): Paths that must have a pair.
        places (dict): Paths that may have one.
        source (str): What to name in messages.
        strict (bool): Whether a difference is an error.
    """
    unexpected = [place for place in adapter.tensors if place[0] not in places]
    missing = [(path, half) for path in expected for half in "AB" if (path, half) not in adapter.tensors]
    problems = []
    if unexpected:
        problems.append(
            (
                UnexpectedTensorsError,
                f"{source} holds {len(unexpected)} LoRA tensors that the network has "
                f"no place for: {listed_parts(unexpected)}. Check target_modules.",
            )
        )
    if missing:
        problems.append(
            (
                MissingTensorsError,
                f"{source} lacks {len(missing)} LoRA tensors of the network: "
                f"{listed_parts(missing)}. Check target_modules.",
            )
        )
    if strict and problems:
        # Both kinds are said at once: they are usually two sides of one mistake.
        raise problems[-1][0](" ".join(message for _, message in problems))
    for _, message in problems:
        logger.warning("%s Loading the rest, as strict is False.", message)
    for place in unexpected:
        del adapter.tensors[place]
    if not adapter.tensors:
        raise MissingTensorsError(f"{source} shares no LoRA tensor with the network. {problems[0][1]}")


def check_shapes(adapter: Adapter, places: Dict[str, MatchedCell], source: str) -> None:
    """Raises ShapeMismatchError where a tensor has not the shape that its cell gives it."""
    wrong, config = [], LoraConfig(use_dora=adapter.use_dora, use_vera=adapter.use_vera)
    for (path, part), array in adapter.tensors.items():
        cell = places[path].cell
        kind = type(cell) if isinstance(cell, LoRACell) else kind_of(cell, config)
        needed = kind.part_shapes(cell, adapter.rank(path)).get(part)
        if needed is None:
            wrong.append(
                f"{name_of((path, part))} is {list(array.shape)}, and the network's {type(cell).__name__} takes none"
            )
        elif array.shape != needed:
            wrong.append(f"{name_of((path, part))} is {list(array.shape)}, the network's is {list(needed)}")
    if wrong:
        raise ShapeMismatchError(f"{source}: {len(wrong)} tensors have another shape: {'; '.join(wrong)}.")


def check_kind(adapter: Adapter, places: Dict[str, MatchedCell], source: str) -> None:
    """Raises MissingTensorsError or UnexpectedTensorsError where one of the two is DoRA's or VeRA's and one is not."""
    for field, part in (("use_dora", "magnitude"), ("use_vera", "lambda_d")):
        trained = getattr(adapter, field)
        wrong = [path for path in adapter.paths if path in places and (part in places[path].cell.parts()) != trained]
        if wrong:
            raise (UnexpectedTensorsError if trained else MissingTensorsError)(
                f"{source} was trained with {field} {trained}, the network was built with {not trained}, at "
                f"{listed(wrong)}: set {field} to {trained}."
            )


def check_rank_and_scale(adapter: Adapter, places: Dict[str, MatchedCell], source: str) -> None:
    """Raises RankMismatchError or ScaleMismatchError where a LoRADense was built with another rank or scale."""
    paths = adapter.paths
    ranks = {path: (adapter.rank(path), places[path].cell.lora_rank) for path in paths}
    wrong = [path for path in paths if ranks[path][0] != ranks[path][1]]
    if wrong:
        found, built = ranks[wrong[0]]
        raise RankMismatchError(
            f"{source} has rank {found}, the network was built with lora_rank {built}: set "
            f"lora_rank to {found}{_only(wrong, paths, 'rank_pattern')}."
        )
    for path in paths:
        cell = places[path].cell
        # A join or a split leaves the last bits of lora_alpha open, not those of an adapter that is loaded as it is.
        if path in adapter.alphas and abs(adapter.scale(path) - cell.scale) > 1e-12 * cell.scale:
            differ = [path for path in paths if abs(adapter.scale(path) - places[path].cell.scale) > 1e-12 * cell.scale]
            name = "use_rslora" if adapter.use_rslora != cell.use_rslora else "lora_alpha"
            found, built = (
                (adapter.use_rslora, cell.use_rslora)
                if name == "use_rslora"
                else (f"{adapter.alphas[path]:g}", f"{cell.lora_alpha:g}")
            )
            raise ScaleMismatchError(
                f"{source} was trained with {name} {found}, the network was built with {built}: "
                f"set {name} to {found}{_only(differ, paths, 'alpha_pattern')}, or its effect is "
                "scaled wrongly."
            )


def _only(wrong, paths, field) -> str:
    """Names the cells that a message is about, where those are not all."""
    return "" if len(wrong) == len(paths) else f" ({field}) for {listed(wrong)}"


def _rename(adapter, new_names):
    adapter.tensors = {(new_names.get(path, path), half): array for (path, half), array in adapter.tensors.items()}
    adapter.alphas = {new_names.get(path, path): alpha for path, alpha in adapter.alphas.items()}
    adapter.embeddings = {new_names.get(path, path) for path in adapter.embeddings}
