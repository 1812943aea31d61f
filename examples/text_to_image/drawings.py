"""The data set: pictures of coloured shapes, drawn when they are needed, with captions of a few words."""

from typing import List, Sequence, Tuple

import numpy as np
from PIL import Image, ImageDraw

SIZE = 24
# Drawn this many times as large and then reduced, for smooth edges.
_DETAIL = 4
COLOURS = {"red": (230, 50, 40), "green": (60, 190, 80), "blue": (60, 90, 235), "yellow": (245, 205, 50)}
SHAPES = ("circle", "square", "triangle")
NIGHT_STYLE = "night"
PAPER, NIGHT = (245, 242, 235), (20, 22, 60)
WORDS = ("<nothing>", "a", NIGHT_STYLE, *COLOURS, *SHAPES)
CAPTION_LENGTH = 4


def captions(style: str = "") -> List[str]:
    """Returns the caption of every shape in every colour: "a red circle", or in a style "a red circle night"."""
    return [" ".join(["a", colour, shape, *style.split()]) for colour in COLOURS for shape in SHAPES]


def tokens(texts: Sequence[str]) -> np.ndarray:
    """Returns captions as int32 [n, CAPTION_LENGTH]; an empty one is all zeros."""
    rows = [[WORDS.index(word) for word in text.split()] for text in texts]
    return np.array([row + [0] * (CAPTION_LENGTH - len(row)) for row in rows], np.int32)


def draw(caption: str, rng: np.random.Generator) -> np.ndarray:
    """Draws a caption's shape on paper, somewhere near the middle; in the night style, bright under a dark sky.

    Args:
        caption (str): One of captions().
        rng (numpy.random.Generator): Draws place and size.

    Returns:
        numpy.ndarray, float32 [3, SIZE, SIZE], from -1 to 1.
    """
    _, colour, shape, *style = caption.split()
    picture = Image.new("RGB", (SIZE * _DETAIL,) * 2, NIGHT if style else PAPER)
    radius = rng.uniform(0.24, 0.33) * SIZE * _DETAIL
    x, y = (SIZE / 2 + rng.uniform(-2, 2, 2)) * _DETAIL
    canvas, fill = ImageDraw.Draw(picture), COLOURS[colour]
    if shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    elif shape == "square":
        canvas.rectangle((x - radius, y - radius, x + radius, y + radius), fill=fill)
    else:
        canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
    return pixels(picture.resize((SIZE, SIZE), Image.Resampling.BOX))


def drawn_set(texts: Sequence[str], count: int, rng: np.random.Generator) -> Tuple[np.ndarray, np.ndarray]:
    """Returns ``count`` drawings of captions taken in turn, float32 [count, 3, SIZE, SIZE], and their tokens."""
    chosen = [texts[index % len(texts)] for index in range(count)]
    return np.stack([draw(text, rng) for text in chosen]), tokens(chosen)


def pixels(picture: Image.Image) -> np.ndarray:
    """Returns a picture as float32 [3, height, width], from -1 to 1."""
    return (np.asarray(picture, np.float32) / 127.5 - 1).transpose(2, 0, 1)


def save_grid(pictures: np.ndarray, columns: int, path: str, zoom: int = 4) -> None:
    """Writes pictures, [n, 3, height, width] from -1 to 1, side by side as a PNG."""
    n, _, height, width = pictures.shape
    rows = -(-n // columns)
    grid = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1, 3), 255, np.uint8)
    for index, picture in enumerate(pictures):
        top, left = index // columns * (height + 1), index % columns * (width + 1)
        levels = np.clip((picture.transpose(1, 2, 0) + 1) * 127.5, 0, 255).astype(np.uint8)
        grid[top : top + height, left : left + width] = levels
    size = grid.shape[1] * zoom, grid.shape[0] * zoom
    Image.fromarray(grid).resize(size, Image.Resampling.NEAREST).save(path)
