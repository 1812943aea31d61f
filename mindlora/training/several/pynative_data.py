"""Training data under the PyNative Trainer for several adapters, some with their own data."""

import copy
import functools
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import numpy as np
from mindspore import Tensor
from mindspore.dataset import Dataset

from mindlora.training.several.data import without_end


class DataOfAdapters:
    """Batches [rows, K, N] for K adapters, each of which gets the batches of a run with it alone.

    It has the interface that the Trainer requires of a dataset. An epoch is an epoch of the longest data.

    Args:
        datasets (list of Dataset): Datasets of batches [rows, N], one for each adapter.
    """

    def __init__(self, datasets: List[Dataset]):
        self.datasets = datasets

    def get_dataset_size(self) -> int:
        """Returns the number of batches in an epoch."""
        return max(dataset.get_dataset_size() for dataset in self.datasets)

    def set_init_step(self, step: int) -> None:
        """Makes the batches begin after ``step`` steps."""
        for dataset in self.datasets:
            dataset.set_init_step(step)

    def create_dict_iterator(self, **_: Any) -> Iterator[Dict[str, Tensor]]:
        """Yields the batches, column -> Tensor, one epoch after another."""
        columns = self.datasets[0].get_col_names()
        for batches in zip(*map(without_end, self.datasets)):
            yield {name: Tensor(np.stack(arrays, 1)) for name, arrays in zip(columns, zip(*batches))}


def with_data_of_adapters(build_dataset: Callable, data_of: Callable) -> Callable:
    """Wraps MindFormers' function that builds a dataset, to include all adapters' data if some have their own.

    ``data_of`` takes a dataset's configuration, and returns each adapter's own MindRecord, or None for the
    configuration's; it returns None if all adapters share one dataset.
    """

    @functools.wraps(build_dataset)
    def build(config: Any, *arguments: Any, **keywords: Any) -> Any:
        data: Optional[Sequence[Optional[str]]] = data_of(config)
        if data is None or not any(data):
            return build_dataset(config, *arguments, **keywords)
        datasets = []
        for path in data:
            own = copy.deepcopy(config)
            if path:
                own.dataloader.dataset_files = path
            datasets.append(build_dataset(own, *arguments, **keywords))
        return DataOfAdapters(datasets)

    return build
