"""Writing MindRecord files whole or not at all."""

import contextlib
import os
import sys
import tempfile
from typing import Dict, Iterable

import numpy as np
from tqdm import tqdm

from mindlora.data.instructions import DataError

_ROWS_A_WRITE = 1000


def write_mindrecord(rows: Iterable[Dict[str, np.ndarray]], path: str, *, overwrite: bool = False) -> int:
    """Writes rows as one MindRecord file and its index (``path`` + ".db"): both complete, or neither.

    Args:
        rows (iterable of dict): Columns as int32 arrays; every row has the columns and shapes of the first.
        path (str): Its name ends in .mindrecord.
        overwrite (bool): Replace a file at ``path``. Default: False.

    Returns:
        int, the number of rows.

    Raises:
        DataError: There is no row, the rows differ, or ``path`` exists or cannot be written.
    """
    check_mindrecord_output(path, overwrite)
    with beside(path) as written:
        return write_rows(rows, written)


def write_rows(rows, path):
    """As write_mindrecord, but straight to ``path``, which a failure leaves half written."""
    from mindspore.mindrecord import FileWriter
    from mindspore.mindrecord.common.exceptions import MindRecordException

    schema, batch, count = None, [], 0
    try:
        writer = FileWriter(path, shard_num=1)
        for row in progress(rows, "writing"):
            # FileWriter itself drops, with no more than a warning, a row that does not fit the schema.
            found = {name: {"type": str(column.dtype), "shape": list(column.shape)} for name, column in row.items()}
            if schema is None:
                schema = found
                writer.add_schema(schema)
            if found != schema or any(column.dtype != np.int32 for column in row.values()):
                raise DataError(
                    f"Row {count + 1} has the columns {found}; every row must have int32 columns, and "
                    f"those of the first row, {schema}."
                )
            batch.append(row)
            count += 1
            if len(batch) == _ROWS_A_WRITE:
                writer.write_raw_data(batch)
                batch = []
        if not count:
            raise DataError("There is no row to write.")
        if batch:
            writer.write_raw_data(batch)
        writer.commit()
    except (MindRecordException, RuntimeError) as error:
        raise DataError(f"MindRecord cannot be written: {error}") from error
    return count


@contextlib.contextmanager
def beside(path):
    """Yields a path to write a MindRecord to; on leaving without an exception, it and its index move to ``path``."""
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    # In a folder of its own, for a MindRecord holds its own name: it can be moved, but not renamed.
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as partial:
        written = os.path.join(partial, name)
        yield written
        # A kill between the steps must not leave a file with another's index under its name.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.replace(written + ".db", path + ".db")
        os.replace(written, path)


def check_mindrecord_output(path, overwrite):
    """Raises DataError unless a MindRecord may be written at ``path``."""
    if not path.endswith(".mindrecord"):
        raise DataError(f"The output {path} must end in .mindrecord: by that MindFormers finds it.")
    if os.path.isdir(path):
        raise DataError(f"The output {path} is a folder.")
    if os.path.exists(path) and not overwrite:
        raise DataError(f"The output {path} exists already: overwrite it expressly, or give another name.")


def progress(items, label):
    """Iterates, with a bar if someone watches and it takes longer than a second."""
    return tqdm(items, desc=label, delay=1, leave=False, disable=not sys.stderr.isatty())
