"""The training data of several adapters under the PyNative Trainer, of which some have data of their own."""

import copy
import functools
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import numpy as np
from mindspore import Tensor
from mindspore.dataset import Dataset

from mindlora.training.several.data import without_end


class DataOfAdapters:
    """Batches [rows, K, N] for K adapters, the k-th of which gets the batches that it would get alone.

    It has what the Trainer asks of a dataset. An epoch is that of the longest data.

    Args:
        datasets (list of Dataset): Of batches [rows, N], one for each adapter.
    """

    def __init__(self, datasets: List[Dataset]):
        self.datasets = datasets

    def get_dataset_size(self) -> int:
        """Returns the number of batches in an epoch."""
        return max(dataset.get_dataset_size() for dataset in self.datasets)

    def set_init_step(self, step: int) -> None:
        """Makes the batches begin after as many steps."""
        for dataset in self.datasets:
            dataset.set_init_step(step)

    def create_dict_iterator(self, **_: Any) -> Iterator[Dict[str, Tensor]]:
        """Yields the batches, column -> Tensor, one epoch after another."""
        columns = self.datasets[0].get_col_names()
        for batches in zip(*map(without_end, self.datasets)):
            yield {name: Tensor(np.stack(arrays, 1)) for name, arrays in zip(columns, zip(*batches))}


def with_data_of_adapters(build_dataset: Callable, data_of: Callable) -> Callable:
    """Returns MindFormers' function that builds a dataset, which then has the data of all adapters if some have own.

    ``data_of`` takes the configuration of a dataset, and returns for each adapter the MindRecord in its place, or None
    for that of the configuration; None if there is one dataset for all.
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
