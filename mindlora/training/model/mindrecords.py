"""The first rows of a MindRecord, which MindSpore reads."""

import contextlib
import itertools
from typing import Dict, Iterator, Optional

import numpy as np

from mindlora.core.errors import ConfigError


def first_rows(path: str, count: Optional[int]) -> Iterator[Dict[str, np.ndarray]]:
    """Yields the columns of the first ``count`` rows of a MindRecord, or of all of them with None.

    Raises ConfigError if it cannot be read.
    """
    from mindspore.mindrecord import FileReader
    from mindspore.mindrecord.common.exceptions import MindRecordException

    try:
        # Closed also when the caller takes fewer rows.
        with contextlib.closing(FileReader(path, num_consumer=1)) as reader:
            yield from itertools.islice(reader.get_next(), count)
    except (MindRecordException, RuntimeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a MindRecord: {' '.join(str(error).split())} Convert the data again."
        ) from error
