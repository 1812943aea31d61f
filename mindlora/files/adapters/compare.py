"""The differences of two adapter files: in settings, in tensors, and cell by cell in A, B and scale B A."""

import dataclasses
from typing import Callable, Dict, Optional, Tuple

import numpy as np
from tqdm import tqdm

from mindlora.core.numerics.dtypes import dtype_name, to_float32
from mindlora.core.numerics.pair_shapes import has_product
from mindlora.core.text import collapse_numbers, columns, fields, number
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter, is_finite, name_of
from mindlora.files.adapters.inspect import UNKNOWN, different, numbers
from mindlora.files.adapters.spectrum import delta_norm, finite_norm, quiet_pair
from mindlora.models.variants.registry import STORED


@dataclasses.dataclass(frozen=True)
class CellDifference:
    """How two adapters differ at a cell that both adapt.

    Attributes:
        equal (bool): Whether A, B, the magnitude and the scale are the same, bit for bit.
        difference_a, difference_b (float): Frobenius norm of the difference; None if the shapes differ, or a tensor is
            not finite.
        difference_magnitude (float): The same for DoRA's magnitudes; also None if either adapter has none.
        difference_delta (float): The same for scale B A; also None if a scale is not known.
        relative (float): difference_delta divided by the norm of the first adapter's scale B A; None if that is zero.
    """

    path: str
    equal: bool
    difference_a: Optional[float]
    difference_b: Optional[float]
    difference_magnitude: Optional[float]
    difference_delta: Optional[float]
    relative: Optional[float]


# Title of a column -> field of CellDifference.
_COLUMNS = {
    "|dA|": "difference_a",
    "|dB|": "difference_b",
    "|dm|": "difference_magnitude",
    "|d(scale B A)|": "difference_delta",
    "relative": "relative",
}


@dataclasses.dataclass(frozen=True)
class DiffReport:
    """How two adapters, at the paths ``first`` and ``second``, differ.

    Attributes:
        equal (bool): Whether all tensors and scales are the same, bit for bit: both change a base in the same way.
        settings (dict): Settings that differ: name -> (of the first, of the second).
        only_in_first, only_in_second (tuple of str): Tensors, with layer numbers combined.
        saved_modules_changed (tuple of str): Parameters of modules_to_save that both hold, with different values.
    """

    first: str
    second: str
    equal: bool
    settings: Dict[str, Tuple[str, str]]
    only_in_first: Tuple[str, ...]
    only_in_second: Tuple[str, ...]
    saved_modules_changed: Tuple[str, ...]
    cells: Tuple[CellDifference, ...]

    def __str__(self) -> str:
        lists = {
            "only in first": self.only_in_first,
            "only in second": self.only_in_second,
            "changed modules": self.saved_modules_changed,
        }
        unequal = [cell for cell in self.cells if not cell.equal]
        lines = fields(
            [
                ("first", self.first),
                ("second", self.second),
                ("equal", "yes" if self.equal else "no"),
                *((name, f"{first} | {second}") for name, (first, second) in self.settings.items()),
                *((name, ", ".join(paths)) for name, paths in lists.items() if paths),
                ("cells", f"{len(self.cells)} in both, {len(self.cells) - len(unequal)} of them equal bit for bit"),
            ]
        )
        if not unequal:
            return lines
        has_magnitudes = any(cell.difference_magnitude is not None for cell in self.cells)
        shown = {title: field for title, field in _COLUMNS.items() if field != "difference_magnitude" or has_magnitudes}
        rows = []
        for cell in unequal:
            values = [getattr(cell, field) for field in shown.values()]
            rows.append([cell.path, *map(number, values)])
        return f"{lines}\n\n{columns(('cell', *shown), rows)}"


def compare_adapters(
    first: str, second: str, *, alpha: Optional[float] = None, allow_pickle: bool = False
) -> DiffReport:
    """Reports how two adapters of any form differ.

    Args:
        first, second (str): As for adapter_files.read.
        alpha (float): lora_alpha of the adapter that does not state it, or of both. Default: None.
        allow_pickle (bool): Whether a .bin may be read. Default: False.

    Returns:
        DiffReport.

    Raises:
        AdapterError: There is no usable adapter at ``first`` or ``second``.
        ScaleMismatchError: ``alpha`` is given, but both files state lora_alpha.
    """
    one, two = adapter_files.read_adapters([first, second], alpha, allow_pickle)
    both = [path for path in one.paths if path in set(two.paths)]
    cells = tuple(
        _cell_difference(one, two, path) for path in tqdm(both, desc="comparing", delay=1, leave=False, disable=None)
    )
    only_in_first = _only_in(one, two)
    only_in_second = _only_in(two, one)
    changed = [
        name
        for name, array in one.saved_modules.items()
        if name in two.saved_modules and not _same(array, two.saved_modules[name])
    ]
    settings_of_two = _settings(two)
    return DiffReport(
        first,
        second,
        all(cell.equal for cell in cells) and not (only_in_first or only_in_second or changed),
        {name: (mine, settings_of_two[name]) for name, mine in _settings(one).items() if mine != settings_of_two[name]},
        only_in_first,
        only_in_second,
        tuple(collapse_numbers(changed)),
        cells,
    )


def _only_in(one: Adapter, other: Adapter) -> Tuple[str, ...]:
    tensors = [name_of(key) for key in one.tensors if key not in other.tensors]
    return tuple(collapse_numbers(tensors + [name for name in one.saved_modules if name not in other.saved_modules]))


def _cell_difference(one: Adapter, two: Adapter, path: str) -> CellDifference:
    parts = one.parts(path)
    other_parts = two.parts(path)
    scale = one.scale(path) if path in one.alphas else None
    other_scale = two.scale(path) if path in two.alphas else None
    row_norms = one.row_norms(path)
    if (
        scale == other_scale
        and parts.keys() == other_parts.keys()
        and all(_same(array, other_parts[part]) for part, array in parts.items())
    ):
        return CellDifference(path, True, 0.0, 0.0, None if row_norms is None else 0.0, 0.0, 0.0)
    a, b = quiet_pair(one, path)
    other_a, other_b = quiet_pair(two, path)
    comparable = (
        one.weight_shape(path) == two.weight_shape(path)
        and has_product(a, b)
        and has_product(other_a, other_b)
        and all(map(is_finite, (a, b, other_a, other_b)))
    )
    delta = relative = None
    if comparable and scale is not None and other_scale is not None:
        delta = delta_norm((scale, a, b), (-other_scale, other_a, other_b))
        norm = delta_norm((scale, a, b))
        relative = delta / norm if norm else None
    return CellDifference(
        path,
        False,
        _difference(a, other_a),
        _difference(b, other_b),
        _difference(row_norms, two.row_norms(path)),
        delta,
        relative,
    )


def _difference(one: Optional[np.ndarray], two: Optional[np.ndarray]) -> Optional[float]:
    """Returns the norm of one - two, or None if one of them is missing or their shapes differ."""
    if one is None or two is None or one.shape != two.shape:
        return None
    return finite_norm(to_float32(one).astype(np.float64) - to_float32(two))


def _settings(adapter: Adapter) -> Dict[str, str]:
    """Returns a file's settings as strings that can be compared."""

    def over_cells(value: Callable[[str], float]) -> str:
        return numbers(different(value(path) for path in adapter.paths if path in adapter.alphas)) or UNKNOWN

    return {
        "form": adapter.dialect,
        "rank": numbers(different(map(adapter.rank, adapter.paths))),
        "lora_alpha": over_cells(adapter.alphas.__getitem__),
        "scale": over_cells(adapter.scale),
        **{variant.name: "yes" if adapter.variant is variant else "no" for variant in STORED},
        "dropout": number(adapter.dropout),
        "targets": ", ".join(collapse_numbers(sorted(adapter.paths))),
        "dtype": ", ".join(different(dtype_name(array.dtype) for array in adapter.tensors.values())),
        "base model": adapter.base_model or UNKNOWN,
        "fingerprint": str(adapter.fingerprint),
    }


def _same(one: np.ndarray, two: np.ndarray) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
