"""Rows of tables: CSV, Parquet, and datasets that Hugging Face's library saved to disk."""

import csv
import io
import os
import sys
from typing import Any, Collection, List, Optional, Tuple

from mindlora.common.text import suggestion
from mindlora.data.rows import Row
from mindlora.errors import DataError

# The columns of a table, and its rows.
Table = Tuple[List[str], List[Row]]


def read_csv(path: str, text: str) -> Table:
    """Reads comma-separated values with a line of names; a location names the line on which the row starts.

    Raises:
        DataError: A quote is not closed, a row has more or fewer cells than there are names, or two names are equal.
    """
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: List[str] = []
    rows, start = [], 1
    try:
        for cells in reader:
            if not columns:
                columns = cells
                _check_names(path, columns)
            elif cells:
                if len(cells) != len(columns):
                    raise DataError(
                        f"{path} has {len(cells)} cells at line {start}, and {len(columns)} columns: put cells that "
                        "hold commas or new lines between double quotes."
                    )
                rows.append(Row(f"line {start}", dict(zip(columns, cells))))
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path} is not valid CSV in the row that starts at line {start}: {error}.") from error
    return columns, rows


def _check_names(path, columns):
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"{path} has two columns '{twice[0]}'.")


def read_parquet(path: str, content: bytes, wanted: Collection[str]) -> Table:
    """Reads a Parquet file; a location counts the rows from 1.

    Args:
        path (str): For messages.
        content (bytes): The file.
        wanted (collection of str): Columns to read, if the file has them.

    Raises:
        DataError: The file is damaged, or of another kind.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content))
        columns = file.schema_arrow.names
        return columns, _rows_of(file.read(columns=[name for name in columns if name in wanted]))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def is_saved_dataset(folder: str) -> bool:
    """Tells whether a folder is a dataset, or several splits of one, that save_to_disk wrote."""
    return any(os.path.exists(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def read_saved_dataset(folder: str, split: Optional[str], wanted: Collection[str]) -> Table:
    """Reads a dataset that Hugging Face's library saved with save_to_disk; a location counts the rows from 1.

    Args:
        folder (str): Where it is.
        split (str, optional): Which split to read. Default: None, for a dataset that has only one or none.
        wanted (collection of str): Columns to read, if the dataset has them.

    Raises:
        DataError: The dataset is damaged, or has several splits and none or an unknown one was named.
    """
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except Exception as error:  # the library passes on whatever the damage causes, KeyError and TypeError included
        raise DataError(
            f"{folder} cannot be read as a saved dataset: {type(error).__name__}: {error}. Copy it again."
        ) from error
    dataset = _choose_split(folder, loaded, split) if isinstance(loaded, datasets.DatasetDict) else loaded
    columns = dataset.column_names
    kept = dataset.select_columns([name for name in columns if name in wanted])
    return columns, _rows_of(kept.with_format("arrow")[:])


def _choose_split(folder, loaded, split):
    names = list(loaded)
    if split is None and len(names) == 1:
        return loaded[names[0]]
    if split is None:
        raise DataError(f"{folder} has the splits {', '.join(names)}: choose one with --split.")
    if split not in loaded:
        raise DataError(f"{folder} has no split '{split}'.{suggestion(split, names)}")
    return loaded[split]


def _rows_of(table) -> List[Row]:
    records = (record for batch in table.to_batches() for record in batch.to_pylist())
    return [Row(f"row {number}", without_nulls(record)) for number, record in enumerate(records, 1)]


def without_nulls(value: Any) -> Any:
    """Leaves out what is null: a table gives each object the keys of all others, without a value."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
