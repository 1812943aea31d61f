"""Inputs of a conversion: files of every known kind, folders of them, and saved datasets."""

import os
from typing import Collection, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from mindlora.data import json_rows, tables
from mindlora.data.files import bare_name, read_bytes, read_text
from mindlora.data.rows import File, Layout, Row
from mindlora.errors import DataError

KINDS = (".json", ".jsonl", ".csv", ".parquet")
_KNOWN = (
    "Give a file that ends in .json (a list), .jsonl (one object per line), .csv or .parquet, also with .gz or .zst "
    "behind, a folder of such files, or a dataset that Hugging Face's datasets saved with save_to_disk."
)


class Source(NamedTuple):
    """One input.

    Attributes:
        path (str): As the user gave it.
        rows (list of Row): What it holds, one or more.
        notes (list of str): What the user should know.
    """

    path: str
    rows: List[Row]
    notes: List[str]


def read_inputs(
    inputs: Union[str, Sequence[str]],
    layout: Layout,
    columns: Sequence[Mapping[str, str]] = (),
    split: Optional[str] = None,
) -> List[Source]:
    """Reads all inputs.

    Args:
        inputs (str or sequence of str): Files, folders of files, folders of save_to_disk.
        layout (Layout): The fields that are looked for.
        columns (sequence of dict): Field -> column; none, one for all inputs, or one for each. Default: none.
        split (str, optional): Which split of a saved dataset to read.

    Returns:
        list of Source, in the order of the inputs. If there are several files, each location names its file.

    Raises:
        DataError: An input is missing, empty, damaged or of an unknown kind; a column or a split is missing; or the
            same input is given twice.
    """
    paths = [inputs] if isinstance(inputs, str) else list(inputs)
    _check_inputs(paths, layout, columns)
    found = [_files_of(path) for path in paths]
    if split is not None and not any(tables.is_saved_dataset(path) for path in paths):
        raise DataError(f"split is '{split}', but no input is a dataset that was saved with save_to_disk.")
    several = sum(len(files) for files, _ in found) > 1
    sources = []
    for number, (path, (files, notes)) in enumerate(zip(paths, found)):
        named = columns[number if len(columns) > 1 else 0] if columns else {}
        rows = []
        for file in files:
            read = layout.rows_of(_read_file(file, layout, split, [*layout.fields, *named.values()]), named)
            rows += [Row(f"{file}: {row.location}", row.record) for row in read] if several else read
        sources.append(Source(path, rows, notes))
    return sources


def _check_inputs(paths, layout, columns):
    if not paths:
        raise DataError("There is no input: name at least one.")
    real = [os.path.realpath(path) for path in paths]
    for number, path in enumerate(real):
        if path in real[:number]:
            raise DataError(
                f"The input {paths[number]} is given twice: its rows would be both trained on and held out."
            )
    if len(columns) not in (0, 1, len(paths)):
        raise DataError(
            f"columns is given {len(columns)} times for {len(paths)} inputs: give it once for all, or once for each."
        )
    for named in columns:
        layout.check(named)


def _files_of(path: str) -> Tuple[List[str], List[str]]:
    """Returns the files of an input, or the folder if it is a saved dataset, and notes on what was left out."""
    if not os.path.isdir(path) or tables.is_saved_dataset(path):
        return [path], []
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    known = [name for name in names if bare_name(name).endswith(KINDS)]
    others = [name for name in names if name not in known]
    shown = ", ".join(others[:10]) + (", ..." if len(others) > 10 else "")
    if not known:
        raise DataError(f"The folder {path} holds no file of a known kind; it holds {shown or 'nothing'}. {_KNOWN}")
    notes = [f"left out in {path}: {shown}"] if others else []
    return [os.path.join(path, name) for name in known], notes


def _read_file(path: str, layout: Layout, split: Optional[str], named: Collection[str]) -> File:
    bare, wanted = bare_name(path), {*named, *layout.aliases.values(), *layout.expands}
    if os.path.isdir(path):
        columns, rows = tables.read_saved_dataset(path, split, wanted)
    elif bare.endswith(".parquet"):
        columns, rows = tables.read_parquet(path, read_bytes(path), wanted)
    elif bare.endswith(".csv"):
        columns, rows = tables.read_csv(path, read_text(path))
    elif bare.endswith((".json", ".jsonl")):
        read = json_rows.read_json_lines if bare.endswith(".jsonl") else json_rows.read_json_list
        columns, rows = [], read(path, read_text(path))
    else:
        raise DataError(f"{path} is of an unknown kind. {_KNOWN}")
    if not rows:
        raise DataError(f"{path} holds no rows.")
    expanded = [part for row in rows for part in layout.expand(row)]
    seen = (key for row in expanded if isinstance(row.record, dict) for key in row.record)
    return File(path, list(dict.fromkeys([*columns, *seen])), expanded)
