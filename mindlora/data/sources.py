"""Inputs of a conversion: files of every known kind, folders of them, and saved datasets; their rows by field."""

import dataclasses
import itertools
import os
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from mindlora.core.errors import DataError
from mindlora.core.text import first_ten, suggestion
from mindlora.data.files import ACCEPTED, KINDS, File, Row, bare_name, is_saved_dataset, read_rows


def _alone(row: Row) -> List[Row]:
    return [row]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fields that a kind of examples is made of.

    Attributes:
        fields (tuple of str): Their names, which are also those of their columns unless the user gives others.
        defaults (dict): Field -> its value in a file that has no such column; other fields must have one.
        aliases (dict): Field -> another name that its column often has.
        expand (callable): Makes rows of one that holds several.
        expands (tuple of str): Further columns that ``expand`` reads.
    """

    fields: Tuple[str, ...]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expand: Callable[[Row], List[Row]] = _alone
    expands: Tuple[str, ...] = ()

    def rows_of(self, file: File, named: Mapping[str, str]) -> List[Row]:
        """Returns the rows of a file with their fields under the names of ``fields``.

        Raises DataError if a column that the user named (field -> column), or one without a default, is in no row.
        """
        columns = {field: self._column(field, file, named) for field in self.fields}
        if all(field == column for field, column in columns.items()):
            return file.rows
        return [Row(row.location, self._rename(row.record, columns)) for row in file.rows]

    def _column(self, field, file, named):
        """Returns the column of a field, or None for one that takes its default."""
        names = [named[field]] if field in named else [field, *filter(None, [self.aliases.get(field)])]
        present = [name for name in names if name in file.columns]
        if len(present) > 1:
            raise DataError(
                f"{file.path} has the columns {' and '.join(present)}: choose with --columns {field}=COLUMN."
            )
        if present:
            return present[0]
        if not file.columns:
            return field  # no row is an object, as each row will report
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
    """One input: its path as the user gave it, its rows, one or more, and what the user should know."""

    path: str
    rows: List[Row]
    notes: List[str]


def read_inputs(
    inputs: Union[str, Sequence[str]],
    layout: Layout,
    columns: Sequence[Mapping[str, str]] = (),
    split: Optional[str] = None,
) -> List[Source]:
    """Reads all inputs, in their order: files, folders of files, folders of save_to_disk.

    If there are several files, each location names its file. ``columns`` has field -> column: none, one mapping for all
    inputs, or one for each. ``split`` is which split of a saved dataset to read. Raises DataError if one of these is
    missing, an input is empty, damaged or of an unknown kind, or the same input is given twice.
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
    """Returns the files of an input, or the folder if it is a saved dataset, and notes on what was left out."""
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
