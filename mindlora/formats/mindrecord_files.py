"""MindRecords without MindSpore: the files that a path names, and how many rows one has."""

import contextlib
import os
import re
import sqlite3
from typing import List, Optional, Sequence, Union


def mindrecord_files(path: Union[str, Sequence[str]]) -> List[str]:
    """Returns the files that MindFormers reads where a YAML names ``path``: itself, or every MindRecord in this folder
    and below; of several files, these."""
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
        # Read-only: what is only looked at must not change.
        with contextlib.closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as database:
            return int(database.execute("SELECT COUNT(*) FROM INDEXES").fetchone()[0])
    except (sqlite3.Error, TypeError):
        return None
