"""What an adapter file holds, and how two of them differ: numbers from A and B alone, without a network or a base.

The change of a weight, scale B A, is [out, in] and never formed: its Frobenius norm follows from two [r, r] matrices,
||B A||_F^2 = trace((A A^T) (B^T B)).
"""

import dataclasses
import math
import os
from typing import Dict, List, Optional, Tuple

import numpy as np
from tqdm import tqdm

from mindlora.adapters import files as adapter_files
from mindlora.adapters.adapter import Adapter, is_finite, listed_parts, name_of
from mindlora.common.tables import columns, fields, number
from mindlora.common.text import collapse_numbers, listed
from mindlora.numerics.dtypes import dtype_name, to_float32


@dataclasses.dataclass(frozen=True)
class CellNorms:
    """One adapted cell.

    Attributes:
        path (str): Under MindFormers' names.
        shape (tuple of int): [out, in] of its weight; of a convolution, in counts each place of the kernel.
        rank (int): r of A [r, in] and B [out, r].
        alpha, scale (float): lora_alpha and what follows from it; None where the file does not say.
        norm_a, norm_b, norm_delta (float): Frobenius norms of A, B and scale B A; None where they are not finite, or
            the scale is not known. With VeRA of diag(lambda_d) A and diag(lambda_b) B, where A is as wide as the widest
            cell: which cell is narrower, the file does not say.
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
    """What stands in an adapter.

    Attributes:
        path (str): Where.
        form (str): ``folder``, or the ending of the file.
        dialect (str): In whose form it is.
        ranks, alphas, scales (tuple): The different ones among the cells.
        use_rslora (bool): Whether the scale is lora_alpha / sqrt(r).
        use_dora (bool): Whether each cell has a magnitude besides (DoRA), to which the rows of W + scale B A are
            brought; then scale B A alone is not what changes.
        use_vera (bool): Whether the cells have A and B in common and vectors of their own (VeRA).
        dropout (float): lora_dropout.
        targets (tuple of str): Paths of the cells, with layer numbers put together.
        tensors, parameters (int): How many there are; modules saved whole count.
        dtypes (tuple of str): Of the tensors.
        tensor_bytes, file_bytes (int): Of the tensors, and of all that stands at the path.
        base_model (str): As the file names it, or None.
        fingerprint (dict): mindlora's mark of the base, or None.
        saved_modules (tuple of str): Parameters of modules_to_save.
        warnings (tuple of str): What is likely wrong.
        cells (tuple of CellNorms): One for each adapted cell.
    """

    path: str
    form: str
    dialect: str
    ranks: Tuple[int, ...]
    alphas: Tuple[float, ...]
    scales: Tuple[float, ...]
    use_rslora: bool
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

    def __str__(self):
        unknown = "not in the file"
        mark = ", ".join(f"{key} {value}" for key, value in (self.fingerprint or {}).items())
        lines = fields(
            [
                ("adapter", self.path),
                ("form", f"{self.form}, {self.dialect}"),
                ("rank", _few(self.ranks)),
                ("lora_alpha", _few(self.alphas) or unknown),
                ("scale", (_few(self.scales) or "not known") + " (rsLoRA: lora_alpha / sqrt(rank))" * self.use_rslora),
                *((("DoRA", "yes, with a magnitude for each row"),) if self.use_dora else ()),
                *(
                    (
                        (
                            "VeRA",
                            "yes: A and B are the same in all cells; below, they are with each cell's vectors in them, A "
                            "as wide as the widest cell",
                        ),
                    )
                    if self.use_vera
                    else ()
                ),
                ("dropout", number(self.dropout)),
                ("targets", ", ".join(self.targets)),
                ("saved whole", ", ".join(self.saved_modules) or "nothing"),
                ("tensors", f"{self.tensors}, {self.parameters:,} parameters, {', '.join(self.dtypes)}"),
                ("bytes", f"{self.tensor_bytes:,} of tensors, {self.file_bytes:,} on disk"),
                ("base model", self.base_model or unknown),
                ("base's mark", mark or unknown),
                *(("warning", text) for text in self.warnings),
            ]
        )
        rows = [
            (
                cell.path,
                f"{cell.shape[0]} x {cell.shape[1]}",
                str(cell.rank),
                number(cell.scale),
                number(cell.norm_a),
                number(cell.norm_b),
                number(cell.norm_delta),
            )
            for cell in self.cells
        ]
        return f"{lines}\n\n" + columns(("cell", "out x in", "rank", "scale", "|A|", "|B|", "|scale B A|"), rows)


@dataclasses.dataclass(frozen=True)
class CellDifference:
    """How two adapters differ at a cell that both adapt.

    Attributes:
        path (str): Under MindFormers' names.
        equal (bool): Whether A, B, the magnitude and the scale are the same, bit for bit.
        difference_a, difference_b (float): Frobenius norm of the difference; None where the shapes differ, or a tensor
            is not finite.
        difference_magnitude (float): The same of DoRA's magnitudes; None where one of the two has none too.
        difference_delta (float): The same of scale B A; None where a scale is not known too.
        relative (float): difference_delta by the norm of the first adapter's scale B A; None where that is zero.
    """

    path: str
    equal: bool
    difference_a: Optional[float]
    difference_b: Optional[float]
    difference_magnitude: Optional[float]
    difference_delta: Optional[float]
    relative: Optional[float]


@dataclasses.dataclass(frozen=True)
class DiffReport:
    """How two adapters differ.

    Attributes:
        first, second (str): Their paths.
        equal (bool): Whether all tensors and scales are the same, bit for bit: both change a base in the same way.
        settings (dict): What is said of both and differs: name -> (of the first, of the second).
        only_in_first, only_in_second (tuple of str): Tensors, with layer numbers put together.
        saved_modules_changed (tuple of str): Parameters that both saved whole, with other values.
        cells (tuple of CellDifference): One for each cell that both adapt.
    """

    first: str
    second: str
    equal: bool
    settings: Dict[str, Tuple[str, str]]
    only_in_first: Tuple[str, ...]
    only_in_second: Tuple[str, ...]
    saved_modules_changed: Tuple[str, ...]
    cells: Tuple[CellDifference, ...]

    def __str__(self):
        same = sum(cell.equal for cell in self.cells)
        lines = fields(
            [
                ("first", self.first),
                ("second", self.second),
                ("equal", "yes" if self.equal else "no"),
                *((name, f"{first} | {second}") for name, (first, second) in self.settings.items()),
                *(
                    (label, ", ".join(found))
                    for label, found in (
                        ("only in first", self.only_in_first),
                        ("only in second", self.only_in_second),
                        ("whole, changed", self.saved_modules_changed),
                    )
                    if found
                ),
                ("cells", f"{len(self.cells)} in both, {same} of them equal bit for bit"),
            ]
        )
        shown = [
            ("|dA|", "difference_a"),
            ("|dB|", "difference_b"),
            ("|dm|", "difference_magnitude"),
            ("|d(scale B A)|", "difference_delta"),
            ("relative", "relative"),
        ]
        if all(cell.difference_magnitude is None for cell in self.cells):
            del shown[2]
        rows = [
            (cell.path, *(number(getattr(cell, field)) for _, field in shown)) for cell in self.cells if not cell.equal
        ]
        titles = ("cell", *(title for title, _ in shown))
        return f"{lines}\n\n{columns(titles, rows)}" if rows else lines


def inspect_adapter(path: str, *, alpha: Optional[float] = None, allow_pickle: bool = False) -> InspectReport:
    """Says what stands in an adapter of any form that is known.

    Args:
        path (str): As for adapter_files.read.
        alpha (float): lora_alpha, where the file does not say. Default: None.
        allow_pickle (bool): Whether a .bin may be read. Default: False.

    Returns:
        InspectReport.

    Raises:
        AdapterError: Nothing usable stands at ``path``.
        ScaleMismatchError: ``alpha`` is given, and the file says lora_alpha itself.
    """
    (adapter,) = read_adapters([path], alpha, allow_pickle)
    cells = tuple(_cell(adapter, place) for place in _progress(adapter.paths, "norms"))
    arrays = [*adapter.stored_tensors().values(), *adapter.saved_modules.values()]
    return InspectReport(
        path,
        _form(path),
        adapter.dialect,
        _different(cell.rank for cell in cells),
        _different(cell.alpha for cell in cells),
        _different(cell.scale for cell in cells),
        adapter.use_rslora,
        adapter.use_dora,
        adapter.use_vera,
        adapter.dropout,
        tuple(collapse_numbers(adapter.paths)),
        len(arrays),
        sum(array.size for array in arrays),
        _different(dtype_name(array.dtype) for array in arrays),
        sum(array.nbytes for array in arrays),
        _size(path),
        adapter.base_model,
        adapter.fingerprint,
        tuple(collapse_numbers(list(adapter.saved_modules))),
        tuple(_warnings(adapter, cells)),
        cells,
    )


def compare_adapters(
    first: str, second: str, *, alpha: Optional[float] = None, allow_pickle: bool = False
) -> DiffReport:
    """Says how two adapters differ, whatever their forms.

    Args:
        first, second (str): As for adapter_files.read.
        alpha (float): lora_alpha of the one that does not say it, or of both. Default: None.
        allow_pickle (bool): Whether a .bin may be read. Default: False.

    Returns:
        DiffReport.

    Raises:
        As inspect_adapter.
    """
    one, two = read_adapters([first, second], alpha, allow_pickle)
    both = [path for path in one.paths if path in set(two.paths)]
    cells = tuple(_cell_difference(one, two, path) for path in _progress(both, "comparing"))
    only = [
        tuple(
            collapse_numbers(
                [name_of(place) for place in mine.tensors if place not in other.tensors]
                + [name for name in mine.saved_modules if name not in other.saved_modules]
            )
        )
        for mine, other in ((one, two), (two, one))
    ]
    changed = [
        name
        for name, array in one.saved_modules.items()
        if name in two.saved_modules and not _same(array, two.saved_modules[name])
    ]
    said = [_settings(adapter) for adapter in (one, two)]
    settings = {name: (said[0][name], said[1][name]) for name in said[0] if said[0][name] != said[1][name]}
    equal = all(cell.equal for cell in cells) and not any(only) and not changed
    return DiffReport(first, second, equal, settings, *only, tuple(collapse_numbers(changed)), cells)


def read_adapters(paths: List[str], alpha: Optional[float] = None, allow_pickle: bool = False) -> List[Adapter]:
    """Returns the adapters at ``paths``, with ``alpha`` where a file does not say lora_alpha.

    Raises:
        AdapterError: Nothing usable stands at one of them.
        ScaleMismatchError: ``alpha`` is given, and each file says lora_alpha itself.
    """
    adapters = [adapter_files.read(path, allow_pickle=allow_pickle) for path in _progress(paths, "reading")]
    if alpha is not None:
        for adapter in [adapter for adapter in adapters if not adapter.alphas] or adapters[:1]:
            adapter.set_alpha(alpha)
    return adapters


def delta_norm(*parts: Tuple[float, np.ndarray, np.ndarray]) -> float:
    """Returns the Frobenius norm of the sum of scale B A over ``parts``, each (scale, A [r, in], B [out, r])."""
    pairs = [
        (scale, *(to_float32(half).astype(np.float64).reshape(len(half), -1) for half in pair))
        for scale, *pair in parts
    ]
    a, b = np.concatenate([a for _, a, _ in pairs]), np.concatenate([scale * b for scale, _, b in pairs], axis=1)
    # Where parts cancel, rounding may leave a square just below zero.
    return math.sqrt(max(0.0, float(((a @ a.T) * (b.T @ b)).sum())))


def _cell(adapter, path) -> CellNorms:
    a, b = _pair(adapter, path)
    scale = adapter.scale(path) if path in adapter.alphas else None
    # A convolution with groups has no scale B A.
    usable = scale is not None and is_finite(a) and is_finite(b) and b.shape[1] == a.shape[0]
    return CellNorms(
        path,
        (b.shape[0], a.size // a.shape[0]),
        adapter.rank(path),
        adapter.alphas.get(path),
        scale,
        _norm(a),
        _norm(b),
        delta_norm((scale, a, b)) if usable else None,
    )


def _cell_difference(one, two, path) -> CellDifference:
    parts = [adapter.parts(path) for adapter in (one, two)]
    first, second = (_pair(adapter, path) for adapter in (one, two))
    scales = [adapter.scale(path) if path in adapter.alphas else None for adapter in (one, two)]
    if (
        scales[0] == scales[1]
        and parts[0].keys() == parts[1].keys()
        and all(_same(array, parts[1][part]) for part, array in parts[0].items())
    ):
        return CellDifference(path, True, 0.0, 0.0, 0.0 if "magnitude" in parts[0] else None, 0.0, 0.0)
    differences = [*map(_difference, first, second), _difference(*(found.get("magnitude") for found in parts))]
    fits = (
        first[0].shape[1:] == second[0].shape[1:]
        and first[1].shape[0] == second[1].shape[0]
        and all(b.shape[1] == a.shape[0] for a, b in (first, second))
    )
    delta = relative = None
    if fits and None not in scales and all(map(is_finite, (*first, *second))):
        delta = delta_norm((scales[0], *first), (-scales[1], *second))
        norm = delta_norm((scales[0], *first))
        relative = delta / norm if norm else None
    return CellDifference(path, False, *differences, delta, relative)


def _pair(adapter, path) -> Tuple[np.ndarray, np.ndarray]:
    # What is not finite is told of by its norm.
    with np.errstate(invalid="ignore", over="ignore"):
        return adapter.pair(path)


def _difference(one, two) -> Optional[float]:
    """Returns the norm of one - two, or None where one of them is missing or they differ in shape."""
    if one is None or two is None or one.shape != two.shape:
        return None
    return _norm(to_float32(one).astype(np.float64) - to_float32(two))


def _settings(adapter) -> Dict[str, str]:
    """Returns what a file says of itself, as texts that are compared."""

    def over_cells(value):
        return _few(_different(value(path) for path in adapter.paths if path in adapter.alphas)) or "not in the file"

    return {
        "form": adapter.dialect,
        "rank": _few(_different(map(adapter.rank, adapter.paths))),
        "lora_alpha": over_cells(adapter.alphas.get),
        "scale": over_cells(adapter.scale),
        "DoRA": "yes" if adapter.use_dora else "no",
        "VeRA": "yes" if adapter.use_vera else "no",
        "dropout": number(adapter.dropout),
        "targets": ", ".join(collapse_numbers(sorted(adapter.paths))),
        "dtype": ", ".join(_different(dtype_name(array.dtype) for array in adapter.tensors.values())),
        "base model": adapter.base_model or "not in the file",
        "base's mark": str(adapter.fingerprint),
    }


def _warnings(adapter, cells):
    def at(chosen):
        return f"{len(chosen)} of {len(cells)} cells: {listed_parts((cell.path, '') for cell in chosen)}"

    broken = [cell for cell in cells if cell.norm_a is None or cell.norm_b is None]
    # A magnitude acts on W alone too.
    idle = [] if adapter.use_dora else [cell for cell in cells if 0.0 in (cell.norm_a, cell.norm_b)]
    wide = [cell for cell in cells if cell.rank > min(cell.shape)]
    if broken:
        yield f"A or B holds NaN or infinity at {at(broken)}."
    if idle:
        yield f"A or B is all zero, so the adapter does nothing, as before any training, at {at(idle)}."
    if not adapter.alphas:
        yield "The file does not say lora_alpha, so the scale is not known. Give it with --alpha."
    if wide:
        yield f"The rank is above the smaller side of the weight, which no change of it can use, at {at(wide)}."
    spoilt = [name for name, array in adapter.saved_modules.items() if not is_finite(array)]
    if spoilt:
        yield f"Saved whole, with NaN or infinity: {listed(spoilt)}."


def _progress(items, label) -> tqdm:
    return tqdm(items, desc=label, delay=1, leave=False, disable=None)


def _norm(array) -> Optional[float]:
    norm = float(np.linalg.norm(array if array.dtype == np.float64 else to_float32(array).astype(np.float64)))
    return norm if math.isfinite(norm) else None


def _same(one, two) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()


def _different(values) -> tuple:
    return tuple(sorted({value for value in values if value is not None}))


def _few(values) -> str:
    return ", ".join(map(number, values))


def _form(path) -> str:
    return "folder" if os.path.isdir(path) else os.path.splitext(path)[1]


def _size(path) -> int:
    files = [os.path.join(folder, name) for folder, _, found in os.walk(path) for name in found]
    return sum(map(os.path.getsize, files or [path]))
