"""MindRecords, read without MindSpore: the files that a path names, and the number of their rows."""

import contextlib
import json
import os
import re
import sqlite3
from typing import Dict, List, Optional, Sequence, Tuple, Union


def mindrecord_files(path: Union[str, Sequence[str]]) -> List[str]:
    """Returns the files that MindFormers reads where a YAML names ``path``: the file, or all MindRecords in and below
    a folder. Several paths name several files."""
    if not isinstance(path, str):
        return [str(file) for file in path]
    if not os.path.isdir(path):
        return [path]
    files = []
    for folder, _, names in os.walk(path):
        files += [os.path.join(folder, name) for name in names if re.search(r"mindrecord\d*$", name)]
    return sorted(files)


def row_count(path: str) -> Optional[int]:
    """Returns how many rows a MindRecord has, or None if it has no readable index beside it.

    MindSpore writes the index in SQLite, a line for each row.
    """
    index = f"{path}.db"
    if not os.path.isfile(index):
        return None
    try:
        # Read-only, so that looking at the file does not change it.
        with contextlib.closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as database:
            return int(database.execute("SELECT COUNT(*) FROM INDEXES").fetchone()[0])
    except (sqlite3.Error, TypeError):
        return None


def column_shapes(path: str) -> Optional[Dict[str, Tuple[int, ...]]]:
    """Returns column -> shape of its arrays in a row of a MindRecord, or None if its header cannot be read.

    The file begins with eight bytes, the length of its header, and with the header in JSON, which lists the columns.
    """
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, os.path.getsize(path))))
        (schema,) = header["schema"]
        return {name: tuple(column.get("shape", ())) for name, column in schema["schema"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
