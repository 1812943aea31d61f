"""Rows of a file, and which of their columns hold what is looked for."""

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Tuple

from mindlora.common.text import suggestion
from mindlora.errors import DataError


class Row(NamedTuple):
    """One row of a file, and where it is.

    Attributes:
        location (str): Such as "line 12" in a .jsonl, "row 3 at line 12" in a .json, or "line 12 (instance 2)"; with
            the file before it if several files are read.
        record: A dict, unless the row is something else.
    """

    location: str
    record: Any


class File(NamedTuple):
    """What a file holds.

    Attributes:
        path (str): Where it is.
        columns (list of str): Their names, in the order of the file.
        rows (list of Row): One or more.
    """

    path: str
    columns: List[str]
    rows: List[Row]


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

    def check(self, named: Mapping[str, str]) -> None:
        """Raises DataError if the user named the column of an unknown field."""
        for field in named:
            if field not in self.fields:
                raise DataError(f"columns: there is no field '{field}'.{suggestion(field, list(self.fields))}")

    def rows_of(self, file: File, named: Mapping[str, str]) -> List[Row]:
        """Returns the rows of a file with their fields under the names of ``fields``.

        Args:
            file (File): What was read.
            named (dict): Field -> its column, as the user named it.

        Raises:
            DataError: A column that the user named, or one without a default, is in no row of the file.
        """
        columns = {field: self._column(field, file, named) for field in self.fields}
        if all(field == column for field, column in columns.items()):
            return file.rows
        return [Row(row.location, self._rename(row.record, columns)) for row in file.rows]

    def _column(self, field, file, named):
        """Returns the column of a field, or None for one that takes its default."""
        names = [named[field]] if field in named else [field, *filter(None, [self.aliases.get(field)])]
        found = [name for name in names if name in file.columns]
        if len(found) > 1:
            raise DataError(f"{file.path} has the columns {' and '.join(found)}: choose with --columns {field}=COLUMN.")
        if found:
            return found[0]
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
