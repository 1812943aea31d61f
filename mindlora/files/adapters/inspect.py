"""Inspects an adapter file: its settings, the norms of its cells, and likely faults."""

import dataclasses
import os
from typing import Iterable, Iterator, List, Optional, Sequence, Tuple

from tqdm import tqdm

from mindlora.core.numerics.dtypes import dtype_name
from mindlora.core.numerics.pair_shapes import has_product
from mindlora.core.text import collapse_numbers, columns, fields, listed, number
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import parts as adapter_parts
from mindlora.files.adapters.adapter import Adapter, is_finite, listed_parts
from mindlora.files.adapters.dialects.peft_config import Extras
from mindlora.files.adapters.spectrum import CellSpectrum, delta_norm, finite_norm, quiet_pair, spectra, spectrum_table
from mindlora.models.variants.registry import STORED

UNKNOWN = "not in the file"
_RANKS = "The rank that holds this share of each cell's energy, the sum of its squared singular values:"


@dataclasses.dataclass(frozen=True)
class CellNorms:
    """One adapted cell.

    Attributes:
        shape (tuple of int): [out, in] of its weight; for a convolution, in counts each element of the kernel.
        alpha, scale (float): lora_alpha and the resulting scale; None if the file does not state it.
        norm_a, norm_b, norm_delta (float): Frobenius norms of A, B and scale B A; None if they are not finite, or the
            scale is not known. With VeRA, the norms are those of diag(lambda_d) A and diag(lambda_b) B, where A is as
            wide as the widest cell, since the file does not say which cells are narrower.
    """

    path: str
    shape: Tuple[int, int]
    rank: int
    alpha: Optional[float]
    scale: Optional[float]
    norm_a: Optional[float]
    norm_b: Optional[float]
    norm_delta: Optional[float]


@dataclasses.dataclass(frozen=True)
class InspectReport:
    """The contents of an adapter.

    Attributes:
        form (str): ``folder``, or the ending of the file.
        dialect (str): The origin of its form.
        ranks, alphas, scales (tuple): The distinct values among the cells.
        use_rslora (bool): Whether the scale is lora_alpha / sqrt(r).
        variant (str): "LoRA", "DoRA", "VeRA", ...; with DoRA, scale B A is not the whole change.
        use_dora, use_vera (bool): Whether that is "DoRA" or "VeRA".
        targets (tuple of str): Paths of the cells, with layer numbers combined.
        tensors, parameters (int): Their number, saved modules included.
        tensor_bytes, file_bytes (int): Size of the tensors, and of all files at the path.
        base_model (str): Name of the base in the file, or None.
        fingerprint (dict): mindlora's fingerprint of the base, or None.
        saved_modules (tuple of str): Parameters of modules_to_save.
        warnings (tuple of str): Likely faults.
        allocation (dict): What AdaLoRA had allocated when it saved the adapter, or None (see Adapter).
        parts (tuple of PartReport): The contents of each part of Stable Diffusion; empty for other models.
        spectra (tuple of CellSpectrum): The singular values of each cell's change; None unless requested.
    """

    path: str
    form: str
    dialect: str
    ranks: Tuple[int, ...]
    alphas: Tuple[float, ...]
    scales: Tuple[float, ...]
    use_rslora: bool
    variant: str
    use_dora: bool
    use_vera: bool
    dropout: float
    targets: Tuple[str, ...]
    tensors: int
    parameters: int
    dtypes: Tuple[str, ...]
    tensor_bytes: int
    file_bytes: int
    base_model: Optional[str]
    fingerprint: Optional[dict]
    saved_modules: Tuple[str, ...]
    warnings: Tuple[str, ...]
    cells: Tuple[CellNorms, ...]
    parts: Tuple[adapter_parts.PartReport, ...] = ()
    spectra: Optional[Tuple[CellSpectrum, ...]] = None
    allocation: Optional[dict] = None

    def __str__(self) -> str:
        fingerprint = ", ".join(f"{key} {value}" for key, value in (self.fingerprint or {}).items())
        formula = " (rsLoRA: lora_alpha / sqrt(rank))" if self.use_rslora else ""
        lines = fields(
            [
                ("adapter", self.path),
                ("form", f"{self.form}, {self.dialect}"),
                ("rank", numbers(self.ranks)),
                ("lora_alpha", numbers(self.alphas) or UNKNOWN),
                ("scale", (numbers(self.scales) or "not known") + formula),
                *((variant.name, variant.report) for variant in STORED if variant.name == self.variant),
                *(("AdaLoRA", text) for text in _allocation(self.allocation)),
                ("dropout", number(self.dropout)),
                *(("part", str(part)) for part in self.parts),
                ("targets", ", ".join(self.targets)),
                ("saved modules", ", ".join(self.saved_modules) or "none"),
                ("tensors", f"{self.tensors}, {self.parameters:,} parameters, {', '.join(self.dtypes)}"),
                ("bytes", f"{self.tensor_bytes:,} of tensors, {self.file_bytes:,} on disk"),
                ("base model", self.base_model or UNKNOWN),
                ("fingerprint", fingerprint or UNKNOWN),
                *(("warning", text) for text in self.warnings),
            ]
        )
        rows = [
            (
                cell.path,
                f"{cell.shape[0]} x {cell.shape[1]}",
                str(cell.rank),
                *map(number, (cell.scale, cell.norm_a, cell.norm_b, cell.norm_delta)),
            )
            for cell in self.cells
        ]
        norms = columns(("cell", "out x in", "rank", "scale", "|A|", "|B|", "|scale B A|"), rows)
        tables = [norms] if self.spectra is None else [norms, _RANKS, spectrum_table(self.spectra)]
        return "\n\n".join([lines, *tables])


def inspect_adapter(
    path: str,
    *,
    alpha: Optional[float] = None,
    allow_pickle: bool = False,
    energy: bool = False,
    target_paths: Optional[str] = None,
) -> InspectReport:
    """Reports the contents of an adapter of any known form.

    Args:
        path (str): As for adapter_files.read.
        alpha (float): lora_alpha, if the file does not state it. Default: None.
        allow_pickle (bool): Whether a .bin may be read. Default: False.
        energy (bool): Whether to compute the singular values of each cell's change. Default: False.
        target_paths (str): Text file with the paths of the network's cells, for an adapter in kohya's form of a model
            that mindlora does not know. Default: None.

    Returns:
        InspectReport.

    Raises:
        AdapterError: There is no usable adapter at ``path``.
        ScaleMismatchError: ``alpha`` is given, but the file states lora_alpha.
    """
    wanted = adapter_parts.Wanted(paths=adapter_parts.read_paths(target_paths))
    refusals: List[str] = []
    (adapter,) = adapter_files.read_adapters([path], alpha, allow_pickle, wanted, Extras(refusals=refusals))
    cells = tuple(
        _cell_norms(adapter, cell) for cell in tqdm(adapter.paths, desc="norms", delay=1, leave=False, disable=None)
    )
    arrays = [*adapter.stored_tensors().values(), *adapter.saved_modules.values()]
    return InspectReport(
        path=path,
        form="folder" if os.path.isdir(path) else os.path.splitext(path)[1],
        dialect=adapter.dialect,
        ranks=different(cell.rank for cell in cells),
        alphas=different(cell.alpha for cell in cells),
        scales=different(cell.scale for cell in cells),
        use_rslora=adapter.use_rslora,
        variant=adapter.variant.name,
        use_dora=adapter.variant.field == "use_dora",
        use_vera=adapter.variant.field == "use_vera",
        dropout=adapter.dropout,
        targets=tuple(collapse_numbers(adapter.paths)),
        parts=adapter_parts.reports(adapter),
        tensors=len(arrays),
        parameters=sum(array.size for array in arrays),
        dtypes=different(dtype_name(array.dtype) for array in arrays),
        tensor_bytes=sum(array.nbytes for array in arrays),
        file_bytes=_size(path),
        base_model=adapter.base_model,
        fingerprint=adapter.fingerprint,
        saved_modules=tuple(collapse_numbers(list(adapter.saved_modules))),
        warnings=(*refusals, *_warnings(adapter, cells)),
        cells=cells,
        spectra=tuple(spectra(adapter)) if energy else None,
        allocation=adapter.allocation,
    )


def _allocation(allocation: Optional[dict]) -> Iterator[str]:
    if allocation:
        rank, target, left_out = (allocation[key] for key in ("rank", "target", "left_out"))
        yield f"{rank} ranks in all" + (f", while its budget was still falling to {target}" if rank > target else "")
        if left_out:
            yield f"no rank for {', '.join(collapse_numbers(left_out))}"


def different(values: Iterable) -> tuple:
    """Returns the distinct values, sorted, without None."""
    return tuple(sorted({value for value in values if value is not None}))


def numbers(values: Iterable[float]) -> str:
    """Returns numbers as text, with commas between them."""
    return ", ".join(map(number, values))


def _cell_norms(adapter: Adapter, path: str) -> CellNorms:
    a, b = quiet_pair(adapter, path)
    scale = adapter.scale(path) if path in adapter.alphas else None
    delta = None
    if scale is not None and is_finite(a) and is_finite(b) and has_product(a, b):
        delta = delta_norm((scale, a, b))
    return CellNorms(
        path,
        adapter.layout(path).channels(a.shape, b.shape),
        adapter.rank(path),
        adapter.alphas.get(path),
        scale,
        finite_norm(a),
        finite_norm(b),
        delta,
    )


def _warnings(adapter: Adapter, cells: Sequence[CellNorms]) -> Iterator[str]:
    def at(found: List[CellNorms]) -> str:
        return f"{len(found)} of {len(cells)} cells: {listed_parts((cell.path, '') for cell in found)}"

    broken = [cell for cell in cells if cell.norm_a is None or cell.norm_b is None]
    # New row norms change W even where B A is zero.
    idle = [] if adapter.variant.row_norms else [cell for cell in cells if 0.0 in (cell.norm_a, cell.norm_b)]
    wide = [cell for cell in cells if cell.rank > min(cell.shape)]
    if broken:
        yield f"A or B holds NaN or infinity at {at(broken)}."
    if idle:
        yield f"A or B is all zero, so the adapter does nothing, as before any training, at {at(idle)}."
    if not adapter.alphas:
        yield "The file does not state lora_alpha, so the scale is not known. Give it with --alpha."
    if wide:
        yield f"The rank is above the smaller side of the weight, so part of it cannot have any effect, at {at(wide)}."
    if adapter.peft_fields.get("fan_in_fan_out"):
        yield (
            "fan_in_fan_out is true: the base may store its weights transposed (GPT-2's Conv1D), into which mindlora "
            "cannot merge. It loads on linear cells."
        )
    not_finite = [name for name, array in adapter.saved_modules.items() if not is_finite(array)]
    if not_finite:
        yield f"Saved modules hold NaN or infinity: {listed(not_finite)}."


def _size(path: str) -> int:
    files = [os.path.join(folder, name) for folder, _, file_names in os.walk(path) for name in file_names]
    return sum(map(os.path.getsize, files or [path]))
