"""Inputs of a conversion: files of every known kind, folders of files, and saved datasets; their rows by field."""

import csv
import dataclasses
import gzip
import io
import itertools
import json
import os
import sys
import zlib
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

from mindlora.core.errors import DataError
from mindlora.core.git_lfs import refuse_pointer
from mindlora.core.text import first_ten, suggestion

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
    """One row of a file, normally a dict, and its location.

    Examples of locations are "line 12" in a .jsonl, "row 3 at line 12" in a .json, and "line 12 (instance 2)"; the file
    comes first if several files are read.
    """

    location: str
    record: Any


class File(NamedTuple):
    """The content of a file; ``columns`` are the names that the file lists, in order: none in JSON."""

    path: str
    columns: List[str]
    rows: List[Row]


def read_rows(path: str, split: Optional[str], columns: Collection[str]) -> File:
    """Reads a file of a kind in KINDS, or a split of a saved dataset; tables yield only ``columns``.

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
    """Returns the bytes of a file, decompressed if its name ends in .gz or .zst; raises DataError if that fails."""
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

    # pyarrow would read an empty file as empty content, but zstd writes a few bytes even for no content.
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
    """Cuts a long text at line ends into pieces of at least ``size`` characters, to be tokenized one at a time."""
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
    # The text is known to be a JSON list, so a second pass only has to find where each record starts.
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
        # Some files hold one object per line and are still named .json.
        advice = "If each line holds one object, name it .jsonl." if error.msg == "Extra data" else "Correct that line."
        raise DataError(
            f"{path} is not valid JSON at line {line}, column {error.colno}: {error.msg}. {advice}"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply at line {first_line}. Correct that row.") from error


def _read_csv(path: str, text: str) -> File:
    """Returns the rows of a CSV file with a header; a location names the line on which the row starts."""
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
    """Reads the requested columns of a Parquet file, as far as it has them; a location counts the rows from 1."""
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
    """Returns whether a folder is a dataset, or the splits of a dataset, that save_to_disk wrote."""
    return any(os.path.exists(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def _read_saved_dataset(folder: str, split: Optional[str], columns: Collection[str]) -> File:
    """Reads the requested columns of a saved dataset, as far as it has them; a location counts the rows from 1."""
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except Exception as error:  # The library passes on whatever the damage causes, KeyError and TypeError included.
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
    """Leaves out nulls: a table gives each object the keys of all other objects, with null as the value."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _alone(row: Row) -> List[Row]:
    return [row]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fields of a kind of examples.

    Attributes:
        fields (tuple of str): The fields' names, which are also their columns' names unless the user gives others.
        defaults (dict): Field -> its value in a file without such a column; other fields need a column.
        aliases (dict): Field -> another common name of its column.
        expand (callable): Expands one row that holds several.
        expands (tuple of str): Further columns that ``expand`` reads.
    """

    fields: Tuple[str, ...]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expand: Callable[[Row], List[Row]] = _alone
    expands: Tuple[str, ...] = ()

    def rows_of(self, file: File, named: Mapping[str, str]) -> List[Row]:
        """Returns the rows of a file with their fields under the names of ``fields``.

        Raises DataError if no row has a column that the user named (field -> column) or that has no default.
        """
        columns = {field: self._column(field, file, named) for field in self.fields}
        if all(field == column for field, column in columns.items()):
            return file.rows
        return [Row(row.location, self._rename(row.record, columns)) for row in file.rows]

    def _column(self, field, file, named):
        """Returns the column of a field, or None if the field takes its default."""
        names = [named[field]] if field in named else [field, *filter(None, [self.aliases.get(field)])]
        present = [name for name in names if name in file.columns]
        if len(present) > 1:
            raise DataError(
                f"{file.path} has the columns {' and '.join(present)}: choose with --columns {field}=COLUMN."
            )
        if present:
            return present[0]
        if not file.columns:
            return field  # No row is an object, as each row will report.
        if field in named or field not in self.defaults:
            raise DataError(
                f"{file.path} has no column '{names[0]}'.{suggestion(names[0], file.columns)} "
                f"Name yours with --columns {field}=COLUMN."
            )
        return None

    def _rename(self, record, columns: Dict[str, Any]):
        if not isinstance(record, dict):
            return record
        rest = {key: value for key, value in record.items() if key not in self.fields}
        fields = {field: record[column] for field, column in columns.items() if column in record}
        return {**rest, **fields, **{field: self.defaults[field] for field, column in columns.items() if not column}}


class Source(NamedTuple):
    """One input: its path as the user gave it, its rows, one or more, and notes for the user."""

    path: str
    rows: List[Row]
    notes: List[str]


def read_inputs(
    inputs: Union[str, Sequence[str]],
    layout: Layout,
    columns: Sequence[Mapping[str, str]] = (),
    split: Optional[str] = None,
) -> List[Source]:
    """Reads all inputs in order: files, folders of files, and folders of save_to_disk.

    If there are several files, each location names its file. ``columns`` maps fields to columns: empty, one mapping for
    all inputs, or one for each. ``split`` is the split of a saved dataset to read. Raises DataError if a file, column
    or split is missing, an input is empty, damaged or of an unknown kind, or the same input is given twice.
    """
    paths = [inputs] if isinstance(inputs, str) else list(inputs)
    _check_inputs(paths, layout, columns)
    if split is not None and not any(map(is_saved_dataset, paths)):
        raise DataError(f"split is '{split}', but no input is a dataset that was saved with save_to_disk.")
    named_columns = list(columns or [{}])
    if len(named_columns) == 1:
        named_columns *= len(paths)
    inputs_files = [_files_of(path) for path in paths]
    several = sum(len(files) for files, _ in inputs_files) > 1
    sources = []
    for path, named, (files, notes) in zip(paths, named_columns, inputs_files):
        rows: List[Row] = []
        for file in files:
            rows += _read_file(file, layout, split, named, several)
        sources.append(Source(path, rows, notes))
    return sources


def _check_inputs(paths, layout, columns):
    if not paths:
        raise DataError("There is no input (--input): name at least one file or folder.")
    seen = set()
    for path in paths:
        real = os.path.realpath(path)
        if real in seen:
            raise DataError(
                f"The input {path} is given twice: its rows would be both trained on and held out. Give it once."
            )
        seen.add(real)
    if len(columns) not in (0, 1, len(paths)):
        raise DataError(
            f"columns is given {len(columns)} times for {len(paths)} inputs: give it once for all, or once for each."
        )
    for field in itertools.chain(*columns):
        if field not in layout.fields:
            raise DataError(f"columns: there is no field '{field}'.{suggestion(field, list(layout.fields))}")


def _files_of(path: str) -> Tuple[List[str], List[str]]:
    """Returns the files of an input, or the folder if it is a saved dataset, and notes on files that were left out."""
    if not os.path.isdir(path) or is_saved_dataset(path):
        return [path], []
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    readable = [name for name in names if bare_name(name).endswith(KINDS)]
    others = [name for name in names if name not in readable]
    if not readable:
        raise DataError(f"The folder {path} holds no file of a known kind; it holds {first_ten(others)}. {ACCEPTED}")
    notes = [f"left out in {path}: {first_ten(others)}"] if others else []
    return [os.path.join(path, name) for name in readable], notes


def _read_file(path, layout, split, named, several):
    """Returns the rows of one file in the layout; if there are several files, their locations name it."""
    used = {*layout.fields, *named.values(), *layout.aliases.values(), *layout.expands}
    file = read_rows(path, split, used)
    if not file.rows:
        raise DataError(f"{path} holds no rows. Remove it from the inputs, or give another file.")
    rows: List[Row] = []
    for row in file.rows:
        rows += layout.expand(row)
    columns = dict.fromkeys(file.columns)
    for row in rows:
        if isinstance(row.record, dict):
            columns.update(dict.fromkeys(row.record))
    rows = layout.rows_of(File(path, list(columns), rows), named)
    return [Row(f"{path}: {row.location}", row.record) for row in rows] if several else rows
