"""PackedAdapter: an adapter in the form of a served network's pools, one block for each cell."""

import dataclasses
import math
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple, cast

import numpy as np

from mindlora.core.errors import AdapterError, NotFiniteError, RankMismatchError, UnexpectedTensorsError
from mindlora.core.numerics.dtypes import BFLOAT16, dtype_name, from_float32, to_float32
from mindlora.core.numerics.folding import Rows
from mindlora.core.numerics.pair_shapes import EXPERTS, Shape
from mindlora.core.text import listed
from mindlora.files.adapters import expert_pairs, files, matching
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.files.adapters.fingerprint import base_difference
from mindlora.files.adapters.matching import CellShape
from mindlora.models import names
from mindlora.network.variants.dora import row_norms
from mindlora.serving.adapter_tables import AdapterTables, BaseTables, refuse_served, take_tables
from mindlora.serving.score_head import ScoreHead, take_score

# Numbers of at least this size round to infinity: halfway from the largest number to the next power of two.
_LIMITS = {np.dtype("<f2"): 65520.0, BFLOAT16: (2 - 2.0**-8) * 2.0**127}


@dataclasses.dataclass(frozen=True)
class ServedLayout:
    """The cells of a served network with a pool, and the conditions on an adapter for a slot.

    Attributes:
        cells (dict): Adapter path -> CellShape.
        max_rank (int): Rows of a slot.
        dtype (dtype): The dtype of the pools: float32, float16 or numerics.dtypes.BFLOAT16.
        fingerprint (callable or None): Takes the paths of the adapted cells and returns the fingerprint of the base's
            weights there (see network.base_fingerprint.fingerprints_of), for adapters that state on which base they
            were trained; None skips this check. It is called in the thread that prepares.
        weights (mapping or None): Adapter path -> the base's weight [out, in] there, for DoRA; None except on a CPU.
        tables (BaseTables or None): The base's embedding and head, for adapters with their own; None refuses them.
        hidden (int or None): The width of the model, for the heads of classifiers; None takes any.
        experts (int): Number of experts of a stacked weight among the cells; 0 without any.
        other_fingerprints (tuple of callables): As fingerprint, for the base in models that order the rows
            of their joined cells differently.
        exact (bool): Whether an adapter is refused if ``dtype`` cannot hold its numbers exactly.
        fills_experts (bool): Whether each expert of a slot has max_rank rows, as in GroupedExperts.
    """

    cells: Mapping[str, CellShape]
    max_rank: int
    dtype: np.dtype = np.dtype("<f4")
    fingerprint: Optional[Callable[[List[str]], Optional[dict]]] = None
    weights: Optional[Mapping[str, Rows]] = None
    tables: Optional[BaseTables] = None
    hidden: Optional[int] = None
    experts: int = 0
    other_fingerprints: Tuple[Callable[[List[str]], Optional[dict]], ...] = ()
    exact: bool = False
    fills_experts: bool = False


class Block(NamedTuple):
    """The content of one cell's slot.

    Attributes:
        rows (array): [r, in_channels + out_channels] of the pool's dtype: row j is A[j, :] followed by B[:, j]. For
            stacked experts, [experts * r, in_channels + out_channels]: each expert's rows in turn; if a layout
            fills experts, max_rank replaces r, with rows of zeros.
        scale (float): The factor of B A.
        gain (array or None): DoRA's m / ||W + scale B A|| - 1 for each row, float32 [out_channels]; None for 0.
    """

    rows: np.ndarray
    scale: float
    gain: Optional[np.ndarray] = None

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.rows.nbytes + (0 if self.gain is None else self.gain.nbytes)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedAdapter:
    """An adapter that has passed all checks and can be copied into a slot.

    Attributes:
        source (str): The file or folder from which it was read.
        blocks (dict): Adapter path -> Block. Other cells get rank 0.
        fingerprint (dict or None): The fingerprint of its training's base, from the file.
        tables (AdapterTables): Its own embedding and output head.
        score (ScoreHead or None): The head of a classifier; None for an adapter that generates text.
        invocation_tokens (tuple of int): The tokens from which on it acts; empty for all tokens.
    """

    source: str
    blocks: Dict[str, Block]
    nbytes: int
    rank_max: int
    fingerprint: Optional[dict] = None
    tables: AdapterTables = AdapterTables()
    score: Optional[ScoreHead] = None
    invocation_tokens: Tuple[int, ...] = ()


class _ServedCells(matching.Cells):
    """The cells of a layout; the adapter's own output head, ``own_head``, includes the pair on it."""

    def __init__(self, layout: ServedLayout, own_head: bool):
        super().__init__(layout.cells)
        self.experts = layout.experts
        self.own_head = own_head

    def expected(self, adapter: Adapter) -> List[str]:
        return [path for path in super().expected(adapter) if not (self.own_head and names.is_output_head(path))]

    def part_shapes(self, adapter: Adapter, path: str) -> Mapping[str, Shape]:
        cell = self.shapes[path]
        if not cell.experts:
            return super().part_shapes(adapter, path)
        size = cast(Shape, (self.experts, cell.out_channels, cell.in_channels))
        return EXPERTS.pair_shapes(size, adapter.rank(path))


def rank_needed(source: str, joins_cells: bool) -> int:
    """Returns the largest rank of an adapter in a network, in which q, k and v are one cell or three.

    Pairs of joined cells have the sum of their parts' ranks. Raises the errors of reading a file.
    """
    adapter = files.read(source, extras=Extras(invocation_tokens=True))
    # Served experts are stacked.
    expert_pairs.stack_pairs(adapter)
    ranks: Dict[str, int] = {}
    for path in adapter.paths:
        cell = names.joined_path(path) if joins_cells else None
        ranks[cell or path] = ranks.get(cell or path, 0) + adapter.rank(path)
    return max(ranks.values(), default=0)


def prepare(source: str, layout: ServedLayout) -> PackedAdapter:
    """Reads an adapter in any known form, checks it as load_lora does, and packs it for the pools of a network.

    VeRA's vectors are multiplied into its projection, and DoRA's magnitudes become gains of rows. Pickles are never
    read. ``source`` is as for adapters.files.read.

    Raises:
        AdapterFormatError, TruncatedAdapterError: The file cannot be read.
        MissingTensorsError, ShapeMismatchError, NotFiniteError, ScaleMismatchError: A tensor cannot be used.
        UnexpectedTensorsError: A tensor has no place, such as a saved module other than embedding, head or score.
        RankMismatchError: A rank is above max_rank.
        AdapterError: The layout is exact, and its dtype would round a number.
        BaseMismatchError: It was trained on another base.
    """
    adapter = files.read(source, extras=Extras(invocation_tokens=True))
    adapter.check_finite(source)
    score = take_score(adapter, layout.hidden, source)
    tables = take_tables(adapter, layout.tables, source)
    if adapter.invocation_tokens and (tables.nbytes or score is not None):
        raise UnexpectedTensorsError(
            f"{source} cannot be served: it acts from its invocation tokens on (alora_invocation_tokens), and holds an "
            "embedding or head of its own, which acts on all tokens. Train it without modules_to_save."
        )
    _check_servable(adapter, layout, source)
    _multiply_projection(adapter, layout)
    cells = _ServedCells(layout, own_head=tables.head is not None)
    # An adapter may consist of tables alone.
    rearranged = bool(adapter.paths) and matching.match(adapter, cells, source)
    _check_ranks(adapter, source, rearranged, layout.max_rank)
    if not rearranged and adapter.paths:
        _check_base(adapter, layout, source)
    blocks = {path: _block(adapter, path, layout, source) for path in adapter.paths}
    return PackedAdapter(
        source,
        blocks,
        sum(block.nbytes for block in blocks.values()) + tables.nbytes + (score.nbytes if score else 0),
        max(map(adapter.rank, blocks), default=0),
        adapter.fingerprint,
        tables,
        score,
        adapter.invocation_tokens,
    )


def _check_servable(adapter: Adapter, layout: ServedLayout, source: str) -> None:
    """Raises UnexpectedTensorsError for pairs that no pool can hold, with the way out."""
    variant = adapter.variant
    if variant.row_norms and layout.weights is None:
        refuse_served(source, f"{variant.tensors} ({variant.field}), which are served on a CPU alone")
    experts = [path for path in adapter.paths if names.is_expert_weight(path) or expert_pairs.is_single(path)]
    if experts and not layout.experts:
        refuse_served(source, f"pairs of routed experts: {listed(experts)}")
    served = {names.to_mindformers(path) for path in layout.cells}
    heads = [path for path in adapter.paths if names.is_output_head(path) and names.to_mindformers(path) not in served]
    if heads:
        refuse_served(source, f"pairs of output heads: {listed(heads)}")


def _multiply_projection(adapter: Adapter, layout: ServedLayout) -> None:
    """Gives each cell its own pair in place of a shared projection (VeRA), so that pairs can be joined."""
    if adapter.variant.own_pair:
        return
    widths: Dict[str, Optional[int]] = {}
    for path, cell in layout.cells.items():
        name = names.to_mindformers(path)
        for alias in (name, names.joined_path(name), *names.joined_parts(name)):
            widths[alias or name] = cell.in_channels
    for path in adapter.paths:
        adapter.narrow(path, widths.get(names.to_mindformers(path)))
    pairs = {path: (*adapter.pair(path), adapter.alphas.get(path)) for path in adapter.paths}
    for path, (a, b, alpha) in pairs.items():
        adapter.remove(path)
        adapter.tensors[path, "A"], adapter.tensors[path, "B"] = a, b
        if alpha is not None:
            adapter.alphas[path] = alpha


def _check_base(adapter: Adapter, layout: ServedLayout, source: str) -> None:
    """Raises BaseMismatchError if the adapter was trained on another base, in any order of rows."""
    if layout.fingerprint is None or adapter.fingerprint is None:
        return
    current = layout.fingerprint(adapter.paths)
    for other in layout.other_fingerprints:
        reordered = other(adapter.paths)
        if reordered and not base_difference(adapter.fingerprint, reordered):
            current = reordered
    matching.check_base(adapter, source, lambda: current, "error")


def _check_ranks(adapter: Adapter, source: str, rearranged: bool, max_rank: int) -> None:
    ranks = {path: adapter.rank(path) for path in adapter.paths}
    wrong = [path for path, rank in ranks.items() if rank > max_rank]
    if wrong:
        joined = " (the pairs of joined cells have the ranks of their parts together)" if rearranged else ""
        raise RankMismatchError(
            f"{source} has rank {max(ranks.values())} at {listed(wrong)}{joined}, but a slot holds up to "
            f"{max_rank}: serve with --max-rank {max(ranks.values())}, of 256 at most, or merge it into its base."
        )


def _block(adapter: Adapter, path: str, layout: ServedLayout, source: str) -> Block:
    dtype = layout.dtype
    a, b = adapter.pair(path)
    if layout.exact and not (_holds(dtype, a) and _holds(dtype, b)):
        raise AdapterError(
            f"{source} holds numbers at {path} that {dtype_name(dtype)} (adapter_dtype) would round. Serve without "
            "--adapter-dtype, or save the adapter in that dtype."
        )
    if not max(map(_largest, (a, b))) < _LIMITS.get(dtype, math.inf):
        raise NotFiniteError(
            f"{source} holds numbers at {path} that {dtype_name(dtype)}, in which this network computes, cannot hold. "
            "Set model.model_config.compute_dtype to bfloat16 or float32."
        )
    rows = pair_rows(a, b, dtype, layout.max_rank if layout.fills_experts else None)
    return Block(rows, adapter.scale(path), _gain(adapter, path, layout, source))


def pair_rows(a: np.ndarray, b: np.ndarray, dtype: np.dtype, rows_of_experts: Optional[int] = None) -> np.ndarray:
    """Returns the rows of a Block, of the pool's dtype.

    Args:
        a, b (array): float32 [r, in_channels] and [out_channels, r]; of stacked experts, with an axis of these before.
        dtype (dtype): The pool's.
        rows_of_experts (int): How many rows each expert gets. Default: None, r.
    """
    *experts, rank, wide = a.shape
    height = rows_of_experts if experts and rows_of_experts else rank
    rows = np.zeros((*experts, height, wide + b.shape[-2]), dtype)
    rows[..., :rank, :wide] = from_float32(a, dtype)
    rows[..., :rank, wide:] = from_float32(b, dtype).swapaxes(-1, -2)
    return rows.reshape(-1, rows.shape[-1])


def _gain(adapter: Adapter, path: str, layout: ServedLayout, source: str) -> Optional[np.ndarray]:
    """Returns Block's gain, or None for an adapter without magnitudes."""
    magnitude = adapter.tensors.get((path, adapter.variant.row_norms))
    if magnitude is None or layout.weights is None:
        return None
    return row_gains(layout.weights[path], adapter.pair(path), adapter.scale(path), magnitude, f"{source} at {path}")


def row_gains(
    weight: Rows, pair: Tuple[np.ndarray, np.ndarray], scale: float, magnitude: np.ndarray, where: str
) -> np.ndarray:
    """Returns DoRA's m / ||W + scale B A|| - 1 of each row, float32 [out_channels].

    Args:
        weight (Rows): W [out_channels, in_channels].
        pair (tuple of array): A [r, in_channels] and B [out_channels, r], float32.
        scale (float): The factor of B A.
        magnitude (array): m [out_channels].
        where (str): The adapter and the cell, for the error.

    Raises NotFiniteError if a row of W + scale B A is zero.
    """
    norms = row_norms(weight, *pair, scale)
    if not norms.all():
        raise NotFiniteError(
            f"{where} rescales rows of zeros, which have no direction: DoRA is not defined there. Load the base that "
            "it was trained on."
        )
    return to_float32(magnitude) / norms - 1


def _holds(dtype: np.dtype, array: np.ndarray) -> bool:
    """Returns whether a dtype holds all numbers of a float32 array exactly."""
    with np.errstate(over="ignore"):
        return np.array_equal(to_float32(from_float32(array, dtype)), array)


def _largest(array: np.ndarray) -> float:
    """Returns the largest absolute value, without a copy of the array."""
    return max(float(array.max()), -float(array.min()))
