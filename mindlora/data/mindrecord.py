"""Writing MindRecord files, each completely or not at all."""

import contextlib
import itertools
import os
import tempfile
from typing import Dict, Iterable, Iterator, Optional

import numpy as np

from mindlora.core.errors import ConfigError, DataError
from mindlora.data.conversion import progress

# Reading the first rows of a MindRecord, with MindSpore.


def first_rows(path: str, count: Optional[int]) -> Iterator[Dict[str, np.ndarray]]:
    """Yields the columns of a MindRecord's first ``count`` rows, or of all rows if ``count`` is None.

    Raises ConfigError if the file cannot be read.
    """
    from mindspore.mindrecord import FileReader
    from mindspore.mindrecord.common.exceptions import MindRecordException

    try:
        # Closes the reader even if the caller takes fewer rows.
        with contextlib.closing(FileReader(path, num_consumer=1)) as reader:
            yield from itertools.islice(reader.get_next(), count)
    except (MindRecordException, RuntimeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a MindRecord: {' '.join(str(error).split())} Convert the data again."
        ) from error


_ROWS_PER_WRITE = 1000


def write_mindrecord(rows: Iterable[Dict[str, np.ndarray]], path: str, *, overwrite: bool = False) -> int:
    """Writes rows as one MindRecord file and its index (``path`` + ".db"), both or neither; returns the number of rows.

    Every row must have the first row's columns, which are int32 arrays, and their shapes. ``path`` must end in
    .mindrecord.

    Raises DataError if there is no row, the rows differ, or ``path`` exists or cannot be written.
    """
    check_mindrecord_output(path, overwrite)
    with replace_mindrecord(path) as written:
        return write_rows(rows, written)


def write_rows(rows: Iterable[Dict[str, np.ndarray]], path: str) -> int:
    """Writes rows directly to ``path``, and returns their number; after a DataError the file is incomplete."""
    from mindspore.mindrecord import FileWriter

    schema = None
    batch = []
    count = 0
    with _writing():
        writer = FileWriter(path, shard_num=1)
    for row in progress(rows, "writing"):
        # FileWriter itself would only warn about a row that does not match the schema, and drop it.
        columns = {name: {"type": str(column.dtype), "shape": list(column.shape)} for name, column in row.items()}
        if schema is None:
            schema = columns
            with _writing():
                writer.add_schema(schema)
        if columns != schema or any(column.dtype != np.int32 for column in row.values()):
            raise DataError(
                f"Row {count + 1} has the columns {columns}; every row must have int32 columns, the same as the "
                f"first row, {schema}."
            )
        batch.append(row)
        count += 1
        if len(batch) == _ROWS_PER_WRITE:
            with _writing():
                writer.write_raw_data(batch)
            batch = []
    if not count:
        raise DataError("write_mindrecord got no rows: give at least one.")
    with _writing():
        if batch:
            writer.write_raw_data(batch)
        writer.commit()
    return count


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    """Raises DataError if the writer fails; errors in making the rows pass through unchanged."""
    from mindspore.mindrecord.common.exceptions import MindRecordException

    try:
        yield
    except (MindRecordException, RuntimeError) as error:
        raise DataError(
            "The MindRecord cannot be written. Check the free space on the disk and your permissions. The writer says: "
            f"{error}"
        ) from error


@contextlib.contextmanager
def replace_mindrecord(path: str) -> Iterator[str]:
    """Yields a path for a MindRecord; if nothing is raised, the file and its index are then moved to ``path``."""
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    # It is written in its own folder, because a MindRecord contains its own name: it can be moved but not renamed.
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as partial:
        written = os.path.join(partial, name)
        yield written
        # If the process is killed between these steps, no file may be left beside another file's index.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.replace(written + ".db", path + ".db")
        os.replace(written, path)


def check_mindrecord_output(path: str, overwrite: bool) -> None:
    """Raises DataError unless a MindRecord may be written at ``path``."""
    if not path.endswith(".mindrecord"):
        raise DataError(f"The output {path} must end in .mindrecord: MindFormers finds it by that ending.")
    if os.path.isdir(path):
        raise DataError(
            f"The output {path} is a folder. Name a file in it, such as {os.path.join(path, 'data.mindrecord')}."
        )
    if os.path.exists(path) and not overwrite:
        raise DataError(f"The output {path} exists already: ask to overwrite it (--overwrite), or give another name.")
