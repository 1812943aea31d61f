"""The MindRecords that a dataset node of a YAML names, and their first rows."""

import contextlib
import itertools
import os
from typing import TYPE_CHECKING, Dict, Iterator, List, Optional, Sequence, Union

import numpy as np

from mindlora.data.mindrecord import mindrecord_files
from mindlora.errors import ConfigError

if TYPE_CHECKING:
    from mindspore.mindrecord import FileReader

Data = Union[str, Sequence[str]]
# The column in which packed rows say which token begins an example.
BOUNDARY = "boundary"


def data_of(dataset: Optional[dict]) -> Optional[Data]:
    """Returns the MindRecords that a dataset node names, or None if they cannot be read yet."""
    loader = (dataset or {}).get("data_loader") or {}
    data = loader.get("dataset_dir") or loader.get("dataset_files")
    if loader.get("type") != "MindDataset" or not data:
        return None
    return data if all(map(os.path.exists, [data] if isinstance(data, str) else data)) else None


def files_of(data: Data) -> List[str]:
    """Returns the files that MindFormers would read."""
    return mindrecord_files(data) if isinstance(data, str) else list(data)


def first_rows(path: str, count: int) -> Iterator[Dict[str, np.ndarray]]:
    """Yields the columns of the first rows of a MindRecord, at most ``count``.

    Raises:
        ConfigError: The file cannot be read.
    """
    with _reader(path) as reader:
        yield from itertools.islice(reader.get_next(), count)


def row_count(path: str) -> int:
    """Returns how many rows a MindRecord has.

    Raises:
        ConfigError: The file cannot be read.
    """
    with _reader(path) as reader:
        return reader.len()


@contextlib.contextmanager
def _reader(path: str) -> "Iterator[FileReader]":
    from mindspore.mindrecord import FileReader
    from mindspore.mindrecord.common.exceptions import MindRecordException

    try:
        reader = FileReader(path, num_consumer=1)
        try:
            yield reader
        finally:
            # Also when the caller takes fewer rows.
            reader.close()
    except (MindRecordException, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read as a MindRecord: {' '.join(str(error).split())}") from error
