"""Reading files as people have them: plain, or compressed by gzip or zstd."""

import gzip
import io
import os
import zlib
from typing import Iterator

from mindlora.common.git_lfs import refuse_pointer
from mindlora.errors import DataError

# Of a tokenizer.
CHARACTERS_PER_CALL = 1 << 20

COMPRESSED = (".gz", ".zst")


def bare_name(path: str) -> str:
    """Returns a path without the ending of a compressed file: "a.jsonl" for "a.jsonl.gz"."""
    stem, ending = os.path.splitext(path)
    return stem if ending in COMPRESSED else path


def read_bytes(path: str) -> bytes:
    """Returns what a file holds, decompressed if its name ends in .gz or .zst.

    Raises:
        DataError: There is no file, or it is damaged.
    """
    if not os.path.isfile(path):
        raise DataError(f"There is no file {path}{': it is a folder' * os.path.isdir(path)}.")
    refuse_pointer(path, DataError)
    try:
        if path.endswith(".gz"):
            with gzip.open(path) as file:
                return file.read()
        if path.endswith(".zst"):
            return _read_zstd(path)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be decompressed: {error}. Copy it again.") from error
    with open(path, "rb") as file:
        return file.read()


def _read_zstd(path):
    import pyarrow

    # pyarrow would take an empty file for one that holds nothing, but zstd writes a few bytes even then.
    if not os.path.getsize(path):
        raise EOFError("it is empty")
    with pyarrow.input_stream(path, compression="zstd") as file:
        return file.read()


def read_text(path: str) -> str:
    """Returns the text of a UTF-8 file; a byte order mark is dropped, and each line ends in a single newline.

    Raises:
        DataError: There is no file, or it is damaged or not UTF-8.
    """
    try:
        return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: byte {error.start} cannot be read ({error.reason}).") from error


def pieces(text: str, size: int = CHARACTERS_PER_CALL) -> Iterator[str]:
    """Cuts a long text at line ends, so that no call of a tokenizer gets all of it.

    Args:
        text (str): The text.
        size (int): Characters of a piece at least, but the last. Default: about a million.
    """
    start = 0
    while start < len(text):
        newline = text.find("\n", start + size)
        end = len(text) if newline == -1 else newline + 1
        yield text[start:end]
        start = end
