"""Resizes an adapter to a smaller rank: the best approximation that the rank allows, cell by cell."""

import dataclasses
import math
from typing import List, Optional, Tuple

import numpy as np
from tqdm import tqdm

from mindlora.core.errors import AdapterError, ConfigError, NotFiniteError
from mindlora.core.fields import COUNT, FACTOR, check_number
from mindlora.core.numerics.dtypes import dtype_name, rounded
from mindlora.core.numerics.pair_shapes import Pair, PairLayout, has_product
from mindlora.core.text import columns, fields, listed, number
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter, is_finite
from mindlora.files.adapters.spectrum import delta_norm, pair_svd, rank_holding


@dataclasses.dataclass(frozen=True)
class ResizedCell:
    """The effect of resizing on one cell.

    Attributes:
        norm (float): ||scale B A||, its Frobenius norm before; for stacked experts, the norm of all of them together.
        error (float): ||scale B A - the same after|| / ||scale B A||, Frobenius norms, with the rounding to the
            adapter's dtype; 0 if scale B A is zero.
    """

    path: str
    rank_before: int
    rank: int
    norm: float
    error: float


@dataclasses.dataclass(frozen=True)
class ResizeReport:
    """The result of resize_adapter.

    Attributes:
        parameters_before, parameters (int): Number of elements of all A and B.
        error (float): The error over all cells: the norm of all differences by the norm of all changes.
    """

    source: str
    output: str
    parameters_before: int
    parameters: int
    error: float
    cells: Tuple[ResizedCell, ...]

    def __str__(self) -> str:
        ranks = sorted({cell.rank for cell in self.cells})
        lines = fields(
            [
                ("adapter", self.source),
                ("output", self.output),
                ("rank", f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]} (rank_pattern)"),
                ("parameters", f"{self.parameters_before:,} -> {self.parameters:,}"),
                ("error", f"{number(self.error)} of the norm of scale B A, over all cells"),
            ]
        )
        rows = [(cell.path, f"{cell.rank_before} -> {cell.rank}", number(cell.error)) for cell in self.cells]
        return f"{lines}\n\n{columns(('cell', 'rank', 'error'), rows)}"


def resize_adapter(
    path: str,
    output: str,
    *,
    rank: Optional[int] = None,
    energy: Optional[float] = None,
    alpha: Optional[float] = None,
    allow_pickle: bool = False,
) -> ResizeReport:
    """Writes an adapter at a smaller rank as a PEFT folder; one of Stable Diffusion as diffusers' folder.

    Args:
        path (str): As for adapter_files.read.
        output (str): The folder to write.
        rank, energy: As in resize.
        alpha (float): lora_alpha, if the file does not state it. Default: None.
        allow_pickle (bool): Whether a .bin may be read. Default: False.

    Returns:
        ResizeReport.

    Raises:
        AdapterError, ConfigError, ScaleMismatchError: As in adapter_files.read and resize.
    """
    adapter_files.check_adapter_output(output, "peft")
    (adapter,) = adapter_files.read_adapters([path], alpha, allow_pickle)
    smaller, cells = resize(adapter, rank=rank, energy=energy)
    adapter_files.write_folder(smaller, output)
    return ResizeReport(path, output, _size(adapter), _size(smaller), _total_error(cells), tuple(cells))


def resize(
    adapter: Adapter, *, rank: Optional[int] = None, energy: Optional[float] = None
) -> Tuple[Adapter, List[ResizedCell]]:
    """Returns the adapter with the largest singular values of each scale B A = U S V^T, and the effect on each cell.

    B' = U_k S_k^(1/2) / sqrt(scale) and A' = S_k^(1/2) V_k^T / sqrt(scale): no other pair of rank k is nearer to
    scale B A (Eckart and Young, 1936). Each cell keeps its scale, so lora_alpha follows the rank, and its dtypes. The
    singular values are exact, through the QR of A^T and B. Stacked experts each have their own, and share one rank.

    Args:
        adapter (Adapter): An adapter of plain LoRA.
        rank (int): The largest rank of a cell; cells of a smaller rank keep theirs. Default: None, no limit.
        energy (float): The share of each cell's energy, the sum of its squared singular values, that the rank must
            hold, in every one of stacked experts: above 0, up to 1. Default: None, as much as ``rank`` allows. With
            both, ``rank`` limits it. kohya's resize script calls the same choice sv_fro, with the square root of this
            share.

    Raises:
        ConfigError: Neither of rank and energy is given, or one is out of range.
        AdapterError: The adapter is not plain LoRA, or has a convolution with groups.
        NotFiniteError: It holds NaN or infinity, or its dtype cannot hold the values of a smaller rank.
        ScaleMismatchError: It does not state lora_alpha.
    """
    _check(adapter, rank, energy)
    smaller = dataclasses.replace(adapter, tensors=dict(adapter.tensors), alphas=dict(adapter.alphas))
    # The pairs no longer split into trained and initial ones, from which training could continue.
    smaller.initialization = None
    cells = []
    for path in tqdm(adapter.paths, desc="resizing", unit="cell", delay=1, leave=False, disable=None):
        scale = adapter.scale(path)
        pair = adapter.pair(path)
        (a, b), kept = _truncated(adapter.layout(path), pair, scale, rank, energy)
        if kept < adapter.rank(path):
            for half, array in (("A", a), ("B", b)):
                smaller.tensors[path, half] = _rounded(array, adapter.tensors[path, half].dtype, f"{half} of {path}")
            smaller.alphas[path] = scale * adapter.alpha_growth(kept)
        norm = delta_norm((scale, *pair))
        difference = delta_norm((scale, *pair), (-smaller.scale(path), *smaller.pair(path)))
        cells.append(ResizedCell(path, adapter.rank(path), kept, norm, difference / norm if norm else 0.0))
    return smaller, cells


def _truncated(
    layout: PairLayout, pair: Pair, scale: float, rank: Optional[int], energy: Optional[float]
) -> Tuple[Pair, int]:
    """Returns A and B of equal norms at the rank that holds ``energy``, at most ``rank``, and that rank."""
    decomposed = [pair_svd(*product, scale) for product in layout.products(*pair)]
    # A rank above the smaller side of the weight has no effect; a file cannot hold a rank of 0.
    kept = max(len(s) if energy is None else max(1, rank_holding(s, energy)) for _, s, _ in decomposed)
    kept = min(kept, rank or kept)
    smaller = []
    for u, s, vh in decomposed:
        root = np.sqrt(s[:kept] / scale)
        smaller.append((root[:, None] * vh[:kept], u[:, :kept] * root))
    return layout.stacked_again(smaller, *(half.shape for half in pair)), kept


def _rounded(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Returns ``array``, which is finite, in a dtype that must hold it."""
    with np.errstate(over="ignore"):
        result = rounded(array.astype(np.float32), dtype)[0]
    if not is_finite(result):
        raise NotFiniteError(
            f"At the smaller rank, {name} would hold {np.abs(array).max():.3g}, which is beyond {dtype_name(dtype)}. "
            "Keep the rank of this adapter, or merge it into its base."
        )
    return result


def _total_error(cells: List[ResizedCell]) -> float:
    whole = math.hypot(*(cell.norm for cell in cells))
    return math.hypot(*(cell.norm * cell.error for cell in cells)) / whole if whole else 0.0


def _size(adapter: Adapter) -> int:
    return sum(array.size for array in adapter.tensors.values())


def _check(adapter: Adapter, rank: Optional[int], energy: Optional[float]) -> None:
    if rank is None and energy is None:
        raise ConfigError(
            "resize_adapter needs a size: give rank (--rank), energy (--energy), the share to keep, or both."
        )
    if rank is not None:
        check_number(rank, "rank", COUNT)
    if energy is not None:
        share = "the share to keep, above 0 and at most 1, such as 0.95"
        check_number(energy, "energy", dataclasses.replace(FACTOR, words=share))
    variant = adapter.variant
    if not variant.is_plain:
        raise AdapterError(
            f"The adapter is {variant.name} ({variant.field}), which cannot be resized: its {variant.tensors} were "
            "trained for this rank. Train it again at a smaller rank, or merge it into the base."
        )
    adapter.check_finite("The adapter")
    grouped = [
        path for path in adapter.paths if not has_product(adapter.tensors[path, "A"], adapter.tensors[path, "B"])
    ]
    if grouped:
        raise AdapterError(
            f"Convolutions with groups cannot be resized, as B A is not defined for them: {listed(grouped)}. Train the "
            "adapter again at a smaller rank."
        )
