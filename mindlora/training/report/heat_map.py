"""Heat maps of the adapter's health, with a row for each kind of cell and a column for each layer."""

import dataclasses
import math
import re
from typing import Callable, Dict, List, Optional, Tuple

# The size of the picture, in units of its viewBox.
WIDTH = 560
LEFT = 132
TOP = 8
ROW = 22
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclasses.dataclass(frozen=True)
class Square:
    """One cell of the network in the picture.

    Attributes:
        shade (float or None): From 0, the smallest value on the map, to 1, the largest; None if the value is unknown.
        title (str): The text that the page shows under the mouse.
        faulty (bool): Whether a rule has a finding for this cell.
    """

    x: float
    y: float
    shade: Optional[float]
    title: str
    faulty: bool


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """The heat map of one quantity; ``low`` and ``high`` are its smallest and its largest value.

    Attributes:
        square (float): Width of a square.
        rows (list): (position, name) of each kind of cell.
        columns (list): (position, label) of the layers that have a label.
    """

    title: str
    low: str
    high: str
    height: float
    square: float
    rows: List[Tuple[float, str]]
    columns: List[Tuple[float, str]]
    squares: List[Square]


def draw_health(health: dict) -> List[HeatMap]:
    """Returns a map for each quantity that at least one cell has, from HealthReport.to_json()."""
    faulty = [finding["path"] for finding in health["findings"] if finding["path"]]
    maps = {}
    for title, value_of in _QUANTITIES:
        values = {path: value_of(cell) for path, cell in health["cells"].items()}
        numbers = [value for value in values.values() if value is not None]
        if numbers:
            maps[title] = _draw(title, values, min(numbers), max(numbers), faulty)
    if _CHANGE in maps:
        maps.pop(_CHANGE_NORM, None)
    return list(maps.values())


def _draw(title: str, values: Dict[str, Optional[float]], low: float, high: float, faulty: List[str]) -> HeatMap:
    places = {path: _place(path) for path in values}
    layers = sorted({layer for layer, _ in places.values()})
    names = list(dict.fromkeys(name for _, name in places.values()))
    width = min(30.0, (WIDTH - LEFT - 4) / len(layers))
    squares = []
    for path, value in values.items():
        layer, name = places[path]
        shown = "not known" if value is None else f"{value:.4g}"
        is_faulty = any(path == place or path.startswith(place + ".") for place in faulty)
        squares.append(
            Square(
                LEFT + layers.index(layer) * width,
                TOP + names.index(name) * ROW,
                None if value is None else _shade(value, low, high),
                f"{path}: {shown}",
                is_faulty,
            )
        )
    every = math.ceil(26 / width) if len(layers) > 1 else 1
    return HeatMap(
        title=title,
        low=f"{low:.3g}",
        high=f"{high:.3g}",
        height=TOP + len(names) * ROW + 34,
        square=width,
        rows=[(TOP + (index + 0.5) * ROW, name) for index, name in enumerate(names)],
        columns=[
            (LEFT + (index + 0.5) * width, "other" if layer < 0 else str(layer))
            for index, layer in enumerate(layers)
            if index % every == 0
        ],
        squares=squares,
    )


def _place(path: str) -> Tuple[int, str]:
    """Returns (layer, name of the cell within the layer); the layer is -1 if the path has no number."""
    number = _LAYER.search(path)
    return (int(number.group(1)), path[number.end() :]) if number else (-1, path)


def _shade(value: float, low: float, high: float) -> float:
    return 0.5 if high <= low else (value - low) / (high - low)


def _gradient_norm(cell: dict) -> Optional[float]:
    norms = [part["gradient_norm"] for part in cell["parts"].values() if part["gradient_norm"] is not None]
    return math.hypot(*norms) if norms else None


def _update(cell: dict) -> Optional[float]:
    return max((part["update"] for part in cell["parts"].values() if part["update"] is not None), default=None)


def _used_rank(cell: dict) -> Optional[float]:
    return None if cell["effective_rank"] is None else cell["effective_rank"] / cell["rank"]


_CHANGE = "Change of the weight, |D| / |W|"
_CHANGE_NORM = "Norm of the change, |D|"
_QUANTITIES: Tuple[Tuple[str, Callable[[dict], Optional[float]]], ...] = (
    (_CHANGE, lambda cell: cell["change"]),
    (_CHANGE_NORM, lambda cell: cell["change_norm"]),
    ("Effective rank / rank", _used_rank),
    ("Norm of the gradient", _gradient_norm),
    ("Largest relative update in a step", _update),
)
