"""Matches an adapter to the cells of a network: the part of matching that needs the cells themselves."""

from typing import Dict, List, NamedTuple, Optional

from mindspore import nn

from mindlora.core.errors import (
    AdapterError,
    MissingTensorsError,
    RankMismatchError,
    ScaleMismatchError,
    UnexpectedTensorsError,
)
from mindlora.core.numerics.pair_shapes import Shape
from mindlora.core.text import listed, shown
from mindlora.files.adapters import joined_pairs, matching
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.expert_pairs import stacked_paths
from mindlora.files.adapters.matching import CellShape, rename
from mindlora.models import names
from mindlora.models.architectures.joined_rows import PartAfterPart, QueryKeyValueInTurn, RowLayout
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.registry import STORED
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight
from mindlora.network.cells.linear_base import channels_of
from mindlora.network.registry import adaptable_linear_types, adaptable_types, kind_of
from mindlora.network.tree import Tree


class _Rows(NamedTuple):
    """Fields of CellShape."""

    kv_heads: Optional[int] = None
    head_dim: Optional[int] = None
    first_rows: Optional[int] = None
    layout: Optional[RowLayout] = None


_NO_ROWS = _Rows()
_MCORE = "mindformers.parallel_core."
# Cells with the rows of linear_qkv or linear_fc1 one part after the other, which a YAML can request.
_LAYOUTS: Dict[str, RowLayout] = {
    "SelfAttentionContiguous": QueryKeyValueInTurn(),
    "MLP": PartAfterPart(),
    "SharedExpertMLP": PartAfterPart(),
}
# A join or a split changes the last bits of lora_alpha.
_SCALE_TOLERANCE = 1e-12


class NetworkCells(matching.Cells):
    """Cells of a network, by the network's own adapter paths: either all of them have an adapter, or none has.

    All cells with an adapter must have a pair, of the same variant.
    """

    def __init__(self, network: nn.Cell, cells: Dict[str, nn.Cell]):
        super().__init__(cell_shapes(network, cells))
        self.cells = cells

    def expected(self, adapter: Adapter) -> List[str]:
        if any(isinstance(cell, LoRACell) for cell in self.cells.values()):
            return list(self.cells)
        return super().expected(adapter)

    def check_variant(self, adapter: Adapter, source: str) -> None:
        built = {path: cell.parts() for path, cell in self.cells.items() if isinstance(cell, LoRACell)}
        for variant in STORED:
            part = variant.parts[0].name
            trained = adapter.variant is variant
            wrong = [path for path in adapter.paths if path in built and (part in built[path]) != trained]
            if wrong:
                raise (UnexpectedTensorsError if trained else MissingTensorsError)(
                    f"{source} was trained with {variant.field} {trained}, but the network was built with "
                    f"{not trained}, at {listed(wrong)}: set {variant.field} to {trained}."
                )

    def part_shapes(self, adapter: Adapter, path: str) -> Dict[str, Shape]:
        cell = self.cells[path]
        if isinstance(cell, LoRACell):
            kind = type(cell)
        else:
            kind = kind_of(cell, LoraConfig(**adapter.variant.fields_for(adapter)))
        return kind.part_shapes(cell, adapter.rank(path))

    def type_of(self, path: str) -> str:
        return type(self.cells[path]).__name__


def check_rank_and_scale(adapter: Adapter, cells: Dict[str, LoRACell], source: str) -> None:
    """Raises RankMismatchError or ScaleMismatchError if a LoRADense was built with another rank or scale."""
    paths = adapter.paths
    wrong = [path for path in paths if adapter.rank(path) != cells[path].lora_rank]
    if wrong:
        rank = adapter.rank(wrong[0])
        raise RankMismatchError(
            f"{source} has rank {rank}, but the network was built with lora_rank {cells[wrong[0]].lora_rank}: set "
            f"lora_rank to {rank}{_only(wrong, paths, 'rank_pattern')}."
        )
    wrong = []
    for path in paths:
        built = cells[path].scale
        if path in adapter.alphas and abs(adapter.scale(path) - built) > _SCALE_TOLERANCE * built:
            wrong.append(path)
    if wrong:
        cell = cells[wrong[0]]
        if adapter.use_rslora != cell.use_rslora:
            field, trained, built = "use_rslora", str(adapter.use_rslora), str(cell.use_rslora)
        else:
            field, trained, built = "lora_alpha", f"{adapter.alphas[wrong[0]]:g}", f"{cell.lora_alpha:g}"
        raise ScaleMismatchError(
            f"{source} was trained with {field} {trained}, but the network was built with {built}: set {field} to "
            f"{trained}{_only(wrong, paths, 'alpha_pattern')}, or its effect is scaled wrongly."
        )


def check_invocation(adapter: Adapter, cells: Dict[str, LoRACell], source: str) -> None:
    """Raises AdapterError if an adapter's invocation tokens differ from those of the network's cells."""
    built = next(iter(cells.values())).invocation_tokens
    trained = adapter.invocation_tokens
    if trained != built:
        named = shown(list(trained)) if trained else "None"
        raise AdapterError(
            f"{source} was trained with alora_invocation_tokens {named}, but the network was built with "
            f"{shown(list(built)) if built else 'None'}: set alora_invocation_tokens to {named}, or the adapter acts "
            "on other tokens than it learned on."
        )


def cell_shapes(network: nn.Cell, cells: Dict[str, nn.Cell]) -> Dict[str, CellShape]:
    """Returns the properties for matching of cells that have an adapter or can take one, by adapter path."""
    rows = _rows(network)
    linear = adaptable_linear_types()
    names_in_file = _own_names(network, cells)
    return {
        path: CellShape(
            *channels_of(cell),
            **rows.get(id(cell), _NO_ROWS)._asdict(),
            name=names_in_file[path],
            linear=isinstance(cell, linear),
            experts=isinstance(cell, (ExpertWeight, LoRAExpertWeight)),
        )
        for path, cell in cells.items()
    }


def split_joined(adapter: Adapter, network: nn.Cell, cells: Dict[str, nn.Cell]) -> None:
    """Converts pairs to Hugging Face's cells: splits those of joined cells that it lacks, by the network's head sizes.

    ``adapter`` is changed in place; ``cells`` is adapter path -> cell.
    """
    rows = _rows(network)
    names_in_file = _own_names(network, cells)
    rename(adapter, names_in_file)
    for path, name in names_in_file.items():
        if (name, "B") in adapter.tensors and names.joined_parts(name) and not names.in_hugging_face(name):
            joined_pairs.split_pairs(adapter, name, *rows[id(cells[path])])
    for joined in filter(None, dict.fromkeys(map(names.joined_path, adapter.paths))):
        # Hugging Face has the parts of most models, and of ChatGLM the joined cell alone.
        if names.in_hugging_face(joined):
            parts = [path for path in names.joined_parts(joined) if (path, "B") in adapter.tensors]
            joined_pairs.join_pairs(adapter, joined, sum(len(adapter.tensors[path, "B"]) for path in parts))


def selection_of(adapter: Adapter, network: nn.Cell, cells: Dict[str, nn.Cell]) -> Dict[str, List[str]]:
    """Returns PEFT's target_modules, and target_parameters if weights of experts are adapted.

    Each holds leaf names, or full paths if cells of the same leaf are not adapted. ``adapter`` has gone through
    split_joined; ``cells`` is adapter path -> cell with an adapter.
    """
    types = adaptable_types()
    plain = {
        path.rpartition(".")[2]
        for path, cell in Tree(network).cells.items()
        # A cell with an adapter can be of the class that it replaced.
        if isinstance(cell, types) and not isinstance(cell, LoRACell)
    }
    present = set(adapter.paths)
    # A pair of a joined cell need not have a share for each of its parts.
    joined = [name for name in _own_names(network, cells).values() if name not in present]
    leaves = {path.rpartition(".")[2] for path in present}
    parts = {part for name in joined for part in names.joined_parts(name) if part.rpartition(".")[2] in leaves}
    all_adapted = not plain & {path.rpartition(".")[2] for path in cells} and parts <= present
    all_adapted = all_adapted and not (adapter.allocation or {}).get("left_out")
    stacked = stacked_paths(adapter)
    fields = {"target_modules": [path for path in adapter.paths if path and path not in stacked]}
    if stacked:
        fields["target_parameters"] = stacked
    # The leaf of a parameter needs the name of its module, since a linear cell can be called down_proj too.
    first = {"target_modules": -1, "target_parameters": -3}
    for field, paths in fields.items():
        names_there = [names.to_hugging_face(path).split(".") for path in paths]
        fields[field] = sorted({".".join(name[first[field] :] if all_adapted else name) for name in names_there})
    return fields


def _own_names(network, cells) -> Dict[str, str]:
    """Returns adapter path in the network -> the cell's path in adapters."""
    return names.canonical(cells, among=[path for path, _ in network.cells_and_names()])


def _rows(network) -> Dict[int, _Rows]:
    """Returns id of a cell -> the sizes that separate a joined cell's rows, taken from its parent."""
    found = {id(network): _NO_ROWS}
    for _, parent in network.cells_and_names():
        kv_heads = getattr(parent, "n_kv_head", None) or getattr(parent, "kv_num_heads", None)
        rows = _Rows(
            kv_heads,
            getattr(parent, "head_dim", None),
            getattr(parent, "q_rank", None),
            _LAYOUTS.get(type(parent).__name__) if type(parent).__module__.startswith(_MCORE) else None,
        )
        found.update({id(child): rows for child in parent.cells()})
    return found


def _only(wrong, paths, field) -> str:
    """Returns the cells that a message concerns as text, or "" if it concerns all of them."""
    return "" if len(wrong) == len(paths) else f" ({field}) for {listed(wrong)}"
