"""Rows and texts of files as people have them: JSON, CSV, Parquet, saved datasets; plain or compressed."""

import csv
import gzip
import io
import json
import os
import sys
import zlib
from typing import Any, Collection, Iterator, List, NamedTuple, Optional

from mindlora.core.errors import DataError
from mindlora.core.git_lfs import refuse_pointer
from mindlora.core.text import suggestion

# The files of a tokenizer.
CHARACTERS_PER_CALL = 1 << 20
COMPRESSED = (".gz", ".zst")
KINDS = (".json", ".jsonl", ".csv", ".parquet")
ACCEPTED = (
    "Give a file that ends in .json (a list), .jsonl (one object per line), .csv or .parquet, also with .gz or .zst "
    "behind, a folder of such files, or a dataset that Hugging Face's datasets saved with save_to_disk."
)
_BETWEEN_RECORDS = ", \t\r\n"


class Row(NamedTuple):
    """One row of a file: a dict, unless it is something else, and where it is.

    The location is such as "line 12" in a .jsonl, "row 3 at line 12" in a .json, or "line 12 (instance 2)"; with the
    file before it if several files are read.
    """

    location: str
    record: Any


class File(NamedTuple):
    """What a file holds; ``columns`` are the names that the file itself lists, in its order: none in JSON."""

    path: str
    columns: List[str]
    rows: List[Row]


def read_rows(path: str, split: Optional[str], columns: Collection[str]) -> File:
    """Reads a file of a kind in KINDS, or a split of a saved dataset; of a table, ``columns`` as far as it has them.

    Raises DataError if the file is missing, damaged, or of an unknown kind.
    """
    bare = bare_name(path)
    if os.path.isdir(path):
        return _read_saved_dataset(path, split, columns)
    if bare.endswith(".parquet"):
        return _read_parquet(path, read_bytes(path), columns)
    if bare.endswith(".csv"):
        return _read_csv(path, read_text(path))
    if bare.endswith(".jsonl"):
        return File(path, [], _read_json_lines(path, read_text(path)))
    if bare.endswith(".json"):
        return File(path, [], _read_json_list(path, read_text(path)))
    raise DataError(f"{path} is of an unknown kind. {ACCEPTED}")


def bare_name(path: str) -> str:
    """Returns a path without the ending of a compressed file: "a.jsonl" for "a.jsonl.gz"."""
    stem, ending = os.path.splitext(path)
    return stem if ending in COMPRESSED else path


def read_bytes(path: str) -> bytes:
    """Returns what a file holds, decompressed if its name ends in .gz or .zst; raises DataError if that fails."""
    if not os.path.isfile(path):
        raise DataError(f"There is no file {path}{': it is a folder' * os.path.isdir(path)}. Correct the path.")
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

    Raises DataError if there is no file, or it is damaged or not UTF-8.
    """
    try:
        return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {error.start} cannot be read ({error.reason}). Convert the file to UTF-8."
        ) from error


def pieces(text: str, size: int = CHARACTERS_PER_CALL) -> Iterator[str]:
    """Cuts a long text at line ends into pieces of at least ``size`` characters: a tokenizer gets one at a time."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start + size)
        end = len(text) if newline == -1 else newline + 1
        yield text[start:end]
        start = end


def _read_json_lines(path: str, text: str) -> List[Row]:
    """Returns the rows of a .jsonl file; a location names the line."""
    # Not splitlines, which also splits at characters that JSON allows inside a string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [Row(f"line {number}", _parse(path, line, number)) for number, line in lines]


def _read_json_list(path: str, text: str) -> List[Row]:
    """Returns the rows of a .json file; a location names the line on which the row starts."""
    records = _parse(path, text)
    if not isinstance(records, list):
        raise DataError(
            f"{path} holds a JSON {type(records).__name__}, not a list of rows. Put the rows into [...], or use .jsonl."
        )
    # The text is known to be a JSON list, so a second pass over it only has to find where each record starts.
    scan = json.JSONDecoder().raw_decode
    rows = []
    line = 1
    counted = 0
    position = text.index("[") + 1
    for number, record in enumerate(records, 1):
        while text[position] in _BETWEEN_RECORDS:
            position += 1
        line += text.count("\n", counted, position)
        counted = position
        rows.append(Row(f"row {number} at line {line}", record))
        _, position = scan(text, position)
    return rows


def _parse(path: str, text: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        # Some write one object per line and still name the file .json.
        advice = "If each line holds one object, name it .jsonl." if error.msg == "Extra data" else "Correct that line."
        raise DataError(
            f"{path} is not valid JSON at line {line}, column {error.colno}: {error.msg}. {advice}"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply at line {first_line}. Correct that row.") from error


def _read_csv(path: str, text: str) -> File:
    """Reads comma-separated values with a line of names; a location names the line on which the row starts."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    columns: List[str] = []
    rows = []
    start = 1
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
        raise DataError(
            f"{path} is not valid CSV in the row that starts at line {start}: {error}. Correct the quotes of that row."
        ) from error
    return File(path, columns, rows)


def _check_names(path, columns):
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise DataError(f"{path} has two columns '{twice[0]}'. Rename one of them.")


def _read_parquet(path: str, content: bytes, columns: Collection[str]) -> File:
    """Reads those of the columns that a Parquet file has; a location counts the rows from 1."""
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content))
        names = file.schema_arrow.names
        return File(path, names, _rows_of(file.read(columns=[name for name in names if name in columns])))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet. Copy or write it again. The reader says: {error}"
        ) from error


def is_saved_dataset(folder: str) -> bool:
    """Returns whether a folder is a dataset, or several splits of one, that save_to_disk wrote."""
    return any(os.path.exists(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def _read_saved_dataset(folder: str, split: Optional[str], columns: Collection[str]) -> File:
    """Reads those of the columns that a dataset of save_to_disk has; a location counts the rows from 1."""
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except Exception as error:  # the library passes on whatever the damage causes, KeyError and TypeError included
        raise DataError(
            f"{folder} cannot be read as a saved dataset: {type(error).__name__}: {error}. Copy it again."
        ) from error
    dataset = _choose_split(folder, loaded, split) if isinstance(loaded, datasets.DatasetDict) else loaded
    names = dataset.column_names
    selected = dataset.select_columns([name for name in names if name in columns])
    return File(folder, names, _rows_of(selected.with_format("arrow")[:]))


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
    return [Row(f"row {number}", _without_nulls(record)) for number, record in enumerate(table.to_pylist(), 1)]


def _without_nulls(value: Any) -> Any:
    """Leaves out what is null: a table gives each object the keys of all others, without a value."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
