"""A progress bar on stderr, for steps that may take a long time."""

import sys
from typing import Iterable, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], label: str) -> Iterable[T]:
    """Iterates over ``items``, with a bar if stderr is a terminal and it takes more than a second."""
    return tqdm(items, desc=label, delay=1, leave=False, disable=not sys.stderr.isatty())
