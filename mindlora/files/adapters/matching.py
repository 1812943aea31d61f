"""Matches an adapter to the cells of a network, known by paths and shapes: names, joined cells, base, shapes.

An adapter of a bare model (layers.0..., as AutoModel has them) gets the names of the model with a head, and back.
"""

import logging
import warnings
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple, cast

import numpy as np

from mindlora.core.errors import (
    AdapterError,
    BaseMismatchError,
    MissingTensorsError,
    ShapeMismatchError,
    TargetError,
    UnexpectedTensorsError,
)
from mindlora.core.numerics.pair_shapes import LINEAR, Shape
from mindlora.files.adapters import expert_pairs, initial_pairs, joined_pairs
from mindlora.files.adapters.adapter import Adapter, listed_parts, name_of
from mindlora.files.adapters.fingerprint import base_difference, forms_of, forms_that_differ
from mindlora.models import names
from mindlora.models.architectures.architecture import LEGACY, MCORE, Architecture
from mindlora.models.architectures.joined_rows import RowLayout
from mindlora.models.target_modules import select_targets

logger = logging.getLogger("mindlora")


class CellShape(NamedTuple):
    """The properties that matching needs of a cell that has an adapter or can take one.

    Attributes:
        in_channels, out_channels (int or None): Sizes of its input and output; None for embeddings.
        kv_heads, head_dim (int or None): Key-value heads of the attention that it belongs to, if any, and their size.
        first_rows (int or None): Rows of the first part of DeepSeek's linear_qkv, if it belongs to such an attention.
        layout (RowLayout or None): A joined cell's order of rows, if it differs from its record's.
        name (str or None): Its path in adapters; None if to_mindformers gives it.
        linear (bool): Whether it is a linear cell.
        experts (bool): Whether it is a stacked weight of experts.
    """

    in_channels: Optional[int]
    out_channels: Optional[int]
    kv_heads: Optional[int] = None
    head_dim: Optional[int] = None
    first_rows: Optional[int] = None
    layout: Optional[RowLayout] = None
    name: Optional[str] = None
    linear: bool = True
    experts: bool = False


class Cells:
    """The cells of a network that have an adapter or can take one, by the network's own adapter paths."""

    def __init__(self, shapes: Mapping[str, CellShape]):
        self.shapes = shapes

    def expected(self, adapter: Adapter) -> List[str]:
        """Returns the paths of the cells that must have a pair: those that the adapter's configuration selects."""
        return selected(adapter, self.shapes)

    def check_variant(self, adapter: Adapter, source: str) -> None:
        """Raises MissingTensorsError or UnexpectedTensorsError if cells were built for another variant of LoRA."""

    def part_shapes(self, adapter: Adapter, path: str) -> Mapping[str, Shape]:
        """Returns part -> shape that an adapter of this variant and rank has on the cell at ``path``."""
        cell = self.shapes[path]
        size = cast(Shape, (cell.out_channels, cell.in_channels))
        return adapter.variant.tensor_shapes(LINEAR, size, adapter.rank(path))

    def type_of(self, path: str) -> str:
        """Returns the class of the cell at ``path``, for messages."""
        return "linear cell"


def match(
    adapter: Adapter,
    cells: Cells,
    source: str,
    strict: bool = True,
    weight_of: Optional[Callable[[str], np.ndarray]] = None,
) -> bool:
    """Gives an adapter the paths and the joined cells of a network, and checks that no tensor is missing or unexpected.

    ``adapter``, ``weight_of``, the result and errors are as in ``arrange``. Other errors say that the tensors differ
    from what the network needs; with ``strict`` False, missing and unexpected tensors only give a warning, and pairs
    without a cell are dropped.
    """
    rearranged = arrange(adapter, cells.shapes, weight_of)
    cells.check_variant(adapter, source)
    _check_names(adapter, cells, source, strict)
    _check_shapes(adapter, cells, source)
    return rearranged


def arrange(
    adapter: Adapter, shapes: Mapping[str, CellShape], weight_of: Optional[Callable[[str], np.ndarray]] = None
) -> bool:
    """Gives an adapter the paths of a network's cells, with pairs joined or split like them; returns whether any were.

    Args:
        adapter (Adapter): Its paths are MindFormers' or the network's own; changed in place.
        shapes (mapping): The network's own adapter path -> CellShape.
        weight_of (callable): Takes one of these paths; returns the cell's weight [out, in], float32, from which raw
            adapters of PiSSA and OLoRA get their initial pairs; without it they get none.

    Raises LoraError if pairs cannot be joined or split, or initial pairs cannot be computed.
    """
    # Path of a cell in adapters -> path in the network.
    network_paths = {cell.name or names.to_mindformers(path): path for path, cell in shapes.items()}
    adapter_paths = {path: name for name, path in network_paths.items()}
    rename(adapter, {**names.canonical(adapter.paths), **adapter_paths})
    if weight_of:
        _complete_initial_pairs(adapter, shapes, network_paths, weight_of)
    rearranged = _arrange_experts(adapter, shapes, network_paths)
    present = set(adapter.paths)
    for path, network_path in network_paths.items():
        if path not in present and not present.isdisjoint(names.joined_parts(path)):
            cell = shapes[network_path]
            joined_pairs.join_pairs(adapter, path, cell.out_channels or 0, cell.kv_heads, cell.layout)
            rearranged = True
    for path in present - set(network_paths):
        parts = names.joined_parts(path)
        if parts and set(parts) <= set(network_paths):
            cell = shapes[network_paths[parts[0]]]
            rows = [shapes[network_paths[part]].out_channels or 0 for part in parts]
            head_dim = cell.head_dim or names.joined_cell(path).layout.head_dim(rows, cell.kv_heads)
            joined_pairs.split_pairs(adapter, path, cell.kv_heads, head_dim, cell.out_channels)
            rearranged = True
    rename(adapter, network_paths)
    for path in adapter.paths:
        if path in shapes:
            # An embedding has no in_channels, and no VeRA either.
            adapter.narrow(path, shapes[path].in_channels)
    return rearranged


def _complete_initial_pairs(
    adapter: Adapter,
    shapes: Mapping[str, CellShape],
    network_paths: Mapping[str, str],
    weight_of: Callable[[str], np.ndarray],
) -> None:
    """Converts a raw adapter of PiSSA or OLoRA to plain pairs, while they still belong to single cells."""

    def rows_of(path: str) -> Tuple[Optional[int], Optional[RowLayout]]:
        cell = shapes[network_paths[path]]
        return cell.kv_heads, cell.layout

    base = initial_pairs.Base(network_paths.keys(), lambda path: weight_of(network_paths[path]), rows_of)
    initial_pairs.complete(adapter, base)


def _arrange_experts(adapter: Adapter, shapes: Mapping[str, CellShape], network_paths: Mapping[str, str]) -> bool:
    """Stacks pairs of single experts, or splits stacked ones, to match the network; returns whether it did."""
    if any(cell.experts for cell in shapes.values()):
        rearranged = bool(expert_pairs.single_paths(adapter))
        expert_pairs.stack_pairs(adapter)
        return rearranged
    rearranged = any(map(expert_pairs.is_single, network_paths)) and bool(expert_pairs.stacked_paths(adapter))
    if rearranged:
        expert_pairs.unstack_pairs(adapter)
    return rearranged


def selected(adapter: Adapter, shapes: Mapping[str, CellShape]) -> List[str]:
    """Returns the network's paths that the adapter's own configuration selects, so that a lost pair is noticed."""
    selection: Dict[str, Any] = adapter.selection
    targets = selection.get("target_modules")
    # As in PEFT, whatever layers_to_transform says.
    stacked = _selected_experts(shapes, selection.get("target_parameters") or ())
    if not targets:
        return stacked
    plain = [path for path, cell in shapes.items() if not cell.experts]
    not_linear = [path for path in plain if not shapes[path].linear]
    try:
        # The tensors show what is missing, also for a regex that was written for several models.
        chosen = select_targets(plain, targets, selection.get("exclude_modules"), warn=False, not_linear=not_linear)
    except TargetError:
        # PEFT accepts names that match nothing if others match, so here only the tensors can show it.
        return stacked
    layers = selection.get("layers_to_transform")
    if layers is not None:
        layers = layers if isinstance(layers, list) else [layers]
        chosen = [path for path in chosen if names.layer_of(path) in layers]
    saved = {name.rpartition(".")[0] for name in adapter.saved_modules}
    return stacked + [
        path for path in chosen if names.to_mindformers(path) not in saved or (path, "A") in adapter.tensors
    ]


def _selected_experts(shapes: Mapping[str, CellShape], parameters: Iterable[str]) -> List[str]:
    """Returns the paths of the stacked weights of experts that target_parameters names."""
    ends = tuple(f".{name}" for name in parameters)
    paths = []
    for path, cell in shapes.items():
        if cell.experts and any(f".{name}".endswith(ends) for name in names.aliases(path)):
            paths.append(path)
    return paths


def _check_names(adapter: Adapter, cells: Cells, source: str, strict: bool) -> None:
    """Checks that the adapter has the tensors of the expected cells, and no others."""
    tensors = adapter.tensors
    problems: List[AdapterError] = []
    unexpected = [key for key in tensors if key[0] not in cells.shapes]
    if unexpected:
        message = (
            f"{source} holds {len(unexpected)} LoRA tensors that the network has no place for: "
            f"{listed_parts(unexpected)}."
        )
        problems.append(UnexpectedTensorsError(message))
    missing = [(path, half) for path in cells.expected(adapter) for half in "AB" if (path, half) not in tensors]
    if missing:
        message = f"{source} lacks {len(missing)} LoRA tensors of the network: {listed_parts(missing)}."
        problems.append(MissingTensorsError(message))
    if strict and problems:
        # One error names both kinds, which are usually two sides of one mistake.
        raise type(problems[-1])(f"{' '.join(map(str, problems))} Check target_modules.")
    for problem in problems:
        logger.warning("%s Check target_modules. Loading the rest, as strict is False.", problem)
    for key in unexpected:
        del tensors[key]
    if not tensors:
        raise MissingTensorsError(
            f"{source} shares no LoRA tensor with the network. {problems[0]} Check target_modules."
        )


def _check_shapes(adapter: Adapter, cells: Cells, source: str) -> None:
    wrong = []
    for (path, part), array in adapter.tensors.items():
        name = f"{name_of((path, part))} is {list(array.shape)}"
        needed = cells.part_shapes(adapter, path).get(part)
        if needed is None:
            wrong.append(f"{name}, and the network's {cells.type_of(path)} takes none")
        elif array.shape != needed:
            wrong.append(f"{name}, the network's is {list(needed)}")
    if wrong:
        raise ShapeMismatchError(
            f"{source}: {len(wrong)} tensors have another shape: {'; '.join(wrong)}. Load it into the model it was "
            "trained on."
        )


def check_base(
    adapter: Adapter, source: str, fingerprint: Callable[[], Optional[dict]], on_base_mismatch: str, exact: bool = False
) -> None:
    """Compares the base that an adapter was trained on with a network's.

    ``adapter`` has its pairs as trained, neither joined nor split. ``fingerprint`` is called only if the
    adapter has one, and returns that of the weights under the adapter, or None if they have no values yet. With
    ``exact``, a copy in another dtype is another base.

    Raises BaseMismatchError if the bases differ, with on_base_mismatch "error".
    """
    if adapter.fingerprint is None or on_base_mismatch == "ignore":
        return
    base = fingerprint()
    if base is None:
        logger.warning(
            "%s: the base has no values yet, so it was not checked whether the adapter was trained on it. Load the "
            "base first, or compare the two yourself.",
            source,
        )
        return
    difference = base_difference(adapter.fingerprint, base, exact)
    forms = forms_that_differ(adapter.fingerprint, base)
    if difference and forms and adapter.fingerprint.get("shapes") == base["shapes"]:
        logger.warning(
            "%s was trained on a base in %s and this one is in %s: only paths and shapes were compared. Check that "
            "both are one model.",
            source,
            *forms,
        )
    elif difference:
        if "loftq" in forms_of(adapter.fingerprint, base):
            difference = "LoftQ changed the base, and its adapter is for the quantized base that was written with it"
        message = f"{source} was trained on another base: {difference}. Load the base checkpoint it was trained on."
        if on_base_mismatch == "error":
            raise BaseMismatchError(message, adapter.fingerprint, base)
        # The caller of load_lora.
        warnings.warn(message, stacklevel=4)


def rename_for(adapter: Adapter, record: Architecture) -> None:
    """Renames pairs to the paths of ``record``: several mcore models call a cell linear_qkv."""
    paths = {path: record.rename_path(names.to_mcore(path), MCORE, LEGACY) or path for path in adapter.paths}
    rename(adapter, paths)


def rename(adapter: Adapter, new_paths: Mapping[str, str]) -> None:
    """Renames pairs; paths that ``new_paths`` lacks stay."""
    adapter.tensors = {(new_paths.get(path, path), part): array for (path, part), array in adapter.tensors.items()}
    adapter.alphas = {new_paths.get(path, path): alpha for path, alpha in adapter.alphas.items()}
    adapter.embeddings = {new_paths.get(path, path) for path in adapter.embeddings}


def complete_bare_names(adapter: Adapter) -> None:
    """Renames an adapter of a bare model to the names of the model with a head; others keep their names."""
    prefix = names.missing_prefix([*adapter.paths, *adapter.token_rows])
    if prefix:
        adapter.bare_prefix = prefix
        _rename_all(adapter, lambda name: names.with_prefix(name, prefix))


def shorten_to_bare_names(adapter: Adapter, paths: Collection[str]) -> None:
    """Renames an adapter to the names of a bare model if the network with cells at ``paths`` is one."""
    prefix = names.missing_prefix(paths)
    if prefix:
        _rename_all(adapter, lambda name: name.removeprefix(prefix))


def _rename_all(adapter: Adapter, renamed: Callable[[str], str]) -> None:
    adapter.tensors = {(renamed(path), part): array for (path, part), array in adapter.tensors.items()}
    adapter.alphas = {renamed(path): alpha for path, alpha in adapter.alphas.items()}
    adapter.embeddings = set(map(renamed, adapter.embeddings))
    saved_modules = {renamed(name): array for name, array in adapter.saved_modules.items()}
    adapter.saved_modules = {names.parameter_in_adapters(name): array for name, array in saved_modules.items()}
    adapter.token_rows = {renamed(path): rows for path, rows in adapter.token_rows.items()}
    if adapter.allocation:
        adapter.allocation = {**adapter.allocation, "left_out": list(map(renamed, adapter.allocation["left_out"]))}
