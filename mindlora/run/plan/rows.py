"""How many rows data has, as the indices beside its MindRecords say."""

import os
from typing import Optional, Sequence, Tuple, Union

from mindlora.core.formats.mindrecord_files import mindrecord_files, row_count

Counted = Tuple[Optional[int], str]


def count_files(source: Union[str, Sequence[str]]) -> Counted:
    """Returns the number of rows of the MindRecords at a path, or None, and where they were counted or why not."""
    files = list(filter(os.path.isfile, mindrecord_files(source)))
    if not files:
        return None, f"{source} holds no MindRecord"
    total = 0
    for path in files:
        rows = row_count(path)
        if rows is None:
            return None, f"{path} has no readable index (.db) beside it, so its rows cannot be counted"
        total += rows
    return total, f"{len(files)} MindRecord{'s' * (len(files) > 1)}"


def longest(counted: Sequence[Counted]) -> Counted:
    """Returns what count_files returned of the longest of several data, or of one whose rows could not be counted."""
    unknown = [each for each in counted if each[0] is None]
    return unknown[0] if unknown else max(counted, key=lambda each: each[0] or 0)
