"""Reads amounts of memory from a command line, and writes them."""

import re

from mindlora.core.errors import ConfigError

GIB = 2**30
_UNITS = {
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def parse_memory(text: str) -> int:
    """Returns the bytes of a text such as 32GB (1000^3) or 29.8GiB (1024^3); raises ConfigError for other texts."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if not match or match[2].lower() not in units or not float(match[1]):
        raise ConfigError(f"--memory is {text!r}: it must be a number above 0 with a unit, such as 32GB or 29.8GiB.")
    return int(float(match[1]) * units[match[2].lower()])


def gib(size: float) -> str:
    """Returns bytes as GiB with two decimals."""
    return f"{size / GIB:,.2f}"


def size_text(size: float) -> str:
    """Returns bytes in a readable unit."""
    for unit, step in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= step:
            return f"{size / step:,.2f} {unit}"
    return f"{size:.0f} bytes"


def bytes_of(dtype: str) -> int:
    """Returns the bytes of one element of float32, float16 or bfloat16."""
    return _BYTES[dtype]
