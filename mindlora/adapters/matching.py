"""Matches an adapter to the cells of a network, known by paths and shapes: names, joined cells, base, shapes."""

import logging
import warnings
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, Type, cast

import numpy as np

from mindlora.adapters import expert_pairs, initial_pairs, joined_pairs
from mindlora.adapters.adapter import Adapter, listed_parts, name_of
from mindlora.adapters.fingerprint import base_difference, forms_that_differ
from mindlora.errors import (
    AdapterError,
    BaseMismatchError,
    MissingTensorsError,
    ShapeMismatchError,
    TargetError,
    UnexpectedTensorsError,
)
from mindlora.models import names
from mindlora.models.joined_rows import RowLayout
from mindlora.models.targets import ALL_LINEAR, select_targets
from mindlora.numerics.pair_layouts import LINEAR, Shape

logger = logging.getLogger("mindlora")


class CellShape(NamedTuple):
    """What matching needs to know about a cell that has an adapter or can take one.

    Attributes:
        in_channels (int or None): Size of its input; None for an embedding.
        out_channels (int or None): Size of its output; None for an embedding.
        kv_heads (int or None): Number of key-value heads of the attention that it belongs to, if any.
        head_dim (int or None): Their size.
        first_rows (int or None): Rows of the first part of DeepSeek's linear_qkv, if it belongs to such an attention.
        layout (RowLayout or None): How a joined cell orders its rows, if not as its record says.
        name (str or None): The path that adapters have it under; None if to_mindformers gives that.
        linear (bool): Whether "all-linear" selects it.
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


class Match:
    """An adapter under the paths of a network's cells, with pairs joined or split like the cells of the network.

    Args:
        adapter (Adapter): Its paths are MindFormers' or the network's own; changed in place.
        shapes (dict): The network's own adapter path -> CellShape.
        source (str): Where the adapter comes from, for messages.
        weight_of (callable): Takes one of the paths; returns the cell's weight [out, in], float32, from which raw
            adapters of PiSSA and OLoRA get their initial pairs. Default: None, they get none.

    Attributes:
        adapter, shapes, source: As above.
        relaid (bool): Whether pairs were joined or split.

    Raises:
        ShapeMismatchError, AdapterError, ScaleMismatchError: Pairs cannot be joined or split.
        LoraError: Initial pairs cannot be computed.
    """

    def __init__(
        self,
        adapter: Adapter,
        shapes: Mapping[str, CellShape],
        source: str,
        weight_of: Optional[Callable[[str], np.ndarray]] = None,
    ):
        self.adapter, self.shapes, self.source = adapter, shapes, source
        own = {cell.name or names.to_mindformers(path): path for path, cell in shapes.items()}
        rename(adapter, {**names.canonical(adapter.paths), **{path: name for name, path in own.items()}})
        if weight_of:
            self._complete_initial_pairs(own, weight_of)
        self.relaid = self._relay_experts(own)
        present = set(adapter.paths)
        for path in own:
            if path not in present and any(part in present for part in names.joined_parts(path)):
                cell = shapes[own[path]]
                joined_pairs.join_pairs(adapter, path, cell.out_channels or 0, cell.kv_heads, cell.layout)
                self.relaid = True
        for path in present - set(own):
            parts = names.joined_parts(path)
            if parts and all(part in own for part in parts):
                cell = shapes[own[parts[0]]]
                joined_pairs.split_pairs(adapter, path, cell.kv_heads, cell.head_dim, cell.out_channels)
                self.relaid = True
        rename(adapter, own)
        for path in adapter.paths:
            if path in shapes:
                # An embedding has no in_channels, and no VeRA either.
                adapter.narrow(path, shapes[path].in_channels)

    def _complete_initial_pairs(self, own: Mapping[str, str], weight_of: Callable[[str], np.ndarray]) -> None:
        """Makes plain pairs of a raw adapter of PiSSA or OLoRA, while they are still those of single cells."""

        def rows_of(path: str) -> Tuple[Optional[int], Optional[RowLayout]]:
            return self.shapes[own[path]].kv_heads, self.shapes[own[path]].layout

        base = initial_pairs.Base(own.keys(), lambda path: weight_of(own[path]), rows_of)
        initial_pairs.complete(self.adapter, base)

    def _relay_experts(self, own: Mapping[str, str]) -> bool:
        """Stacks pairs of single experts, or splits stacked ones, as the network has them; tells whether it did."""
        adapter = self.adapter
        if any(cell.experts for cell in self.shapes.values()):
            relaid = bool(expert_pairs.single_paths(adapter))
            expert_pairs.stack_pairs(adapter)
            return relaid
        apart = any(map(expert_pairs.is_single, own)) and bool(expert_pairs.stacked_paths(adapter))
        if apart:
            expert_pairs.split_pairs(adapter)
        return apart

    def selected(self) -> List[str]:
        """Returns the paths that the adapter's own configuration selects, so that a lost pair is noticed."""
        adapter = self.adapter
        selection: Dict[str, Any] = adapter.selection
        targets = selection.get("target_modules")
        parameters = tuple("." + name for name in selection.get("target_parameters") or ())
        # As in PEFT, whatever layers_to_transform says.
        stacked = [
            path
            for path, cell in self.shapes.items()
            if cell.experts and any(("." + name).endswith(parameters) for name in names.aliases(path))
        ]
        if not targets:
            return stacked
        # As in apply_lora.
        plain = [
            path for path, cell in self.shapes.items() if not cell.experts and (cell.linear or targets != ALL_LINEAR)
        ]
        try:
            # The tensors tell what is missing, also of a regex that was written for several models.
            chosen = select_targets(plain, targets, selection.get("exclude_modules"), warn=False)
        except TargetError:
            # PEFT accepts names that match nothing if others match, so here only the tensors can tell.
            return stacked
        layers = selection.get("layers_to_transform")
        if layers is not None:
            wanted = set(layers if isinstance(layers, list) else [layers])
            chosen = [path for path in chosen if names.layer_of(path) in wanted]
        saved = {name.rpartition(".")[0] for name in adapter.saved_modules}
        return stacked + [
            path for path in chosen if names.to_mindformers(path) not in saved or (path, "A") in adapter.tensors
        ]

    def check_names(self, expected: List[str], strict: bool) -> None:
        """Raises UnexpectedTensorsError or MissingTensorsError if adapter and network hold different tensors.

        Args:
            expected (list of str): Paths of cells that must have a pair.
            strict (bool): With False, differences only give a warning, and pairs without a cell are dropped.
        """
        tensors = self.adapter.tensors
        problems: List[Tuple[Type[AdapterError], str]] = []
        unexpected = [key for key in tensors if key[0] not in self.shapes]
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
        wrong = []
        for key, array in self.adapter.tensors.items():
            path, part = key
            needed = self.part_shapes(path).get(part)
            if needed is None:
                wrong.append(
                    f"{name_of(key)} is {list(array.shape)}, and the network's {self.kind_of(path)} takes none"
                )
            elif array.shape != needed:
                wrong.append(f"{name_of(key)} is {list(array.shape)}, the network's is {list(needed)}")
        if wrong:
            raise ShapeMismatchError(
                f"{self.source}: {len(wrong)} tensors have another shape: {'; '.join(wrong)}. Load it into the model "
                "it was trained on."
            )

    def part_shapes(self, path: str) -> Mapping[str, Shape]:
        """Returns part -> shape of the adapter's variant and rank on the linear cell at ``path``."""
        cell, rank = self.shapes[path], self.adapter.rank(path)
        return self.adapter.variant.tensor_shapes(LINEAR, cast(Shape, (cell.out_channels, cell.in_channels)), rank)

    def kind_of(self, path: str) -> str:
        """Returns what the cell at ``path`` is, for messages."""
        return "linear cell"

    def check_base(self, fingerprint: Callable[[], Optional[dict]], on_base_mismatch: str, exact: bool = False) -> None:
        """Compares the base that the adapter was trained on with the network's.

        Args:
            fingerprint (callable): Returns the fingerprint of the weights under the adapter, or None if they have no
                values yet; called only if the adapter has one.
            on_base_mismatch (str): One of ON_BASE_MISMATCH.
            exact (bool): Whether a copy in another dtype is another base. Default: False.

        Raises:
            BaseMismatchError: The bases differ, with on_base_mismatch "error".
        """
        adapter, source = self.adapter, self.source
        if self.relaid or adapter.fingerprint is None or on_base_mismatch == "ignore":
            return
        found = fingerprint()
        if found is None:
            logger.warning(
                "%s: the base has no values yet, so it was not checked whether the adapter was trained on it.", source
            )
            return
        difference = base_difference(adapter.fingerprint, found, exact)
        forms = forms_that_differ(adapter.fingerprint, found)
        if difference and forms and adapter.fingerprint.get("shapes") == found["shapes"]:
            logger.warning(
                "%s was trained on a base in %s and this one is in %s: only paths and shapes were compared.",
                source,
                *forms,
            )
        elif difference:
            message = f"{source} was trained on another base: {difference}. Load the base checkpoint it was trained on."
            if on_base_mismatch == "error":
                raise BaseMismatchError(message, adapter.fingerprint, found)
            # The caller of load_lora.
            warnings.warn(message, stacklevel=4)


def rename(adapter: Adapter, new_paths: Mapping[str, str]) -> None:
    """Gives pairs other paths; those that ``new_paths`` lacks keep theirs."""
    adapter.tensors = {(new_paths.get(path, path), part): array for (path, part), array in adapter.tensors.items()}
    adapter.alphas = {new_paths.get(path, path): alpha for path, alpha in adapter.alphas.items()}
    adapter.embeddings = {new_paths.get(path, path) for path in adapter.embeddings}
