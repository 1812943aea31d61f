"""Training data for several adapters, some with their own data: each batch has rows for every adapter."""

import atexit
import copy
import threading
from typing import Iterator, List, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindformers.dataset import build_dataset
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindspore.dataset import Dataset

from mindlora.core.formats.mindrecord_files import mindrecord_files

# More than any run has: MindSpore can start within the data only if its size is known.
_EPOCHS = 2**24


@MindFormerRegister.register(MindFormerModuleType.DATASET, legacy=True)
class DataOfAdapters:
    """A dataset of [rows, K, N] for K adapters, each of which gets the batches of a run with it alone.

    An epoch is an epoch of the longest data. Shorter data begins its next epoch meanwhile, as in a run alone.

    Args:
        dataset_config (MindFormerConfig): As for ``task``.
        task (str): The task with which MindFormers builds the dataset of one adapter.
        data (sequence of str or None): Each adapter's own MindRecord; None for dataset_config's.
        first_step (int): The step of the run after which the data starts. Default: 0.
    """

    def __new__(
        cls, dataset_config: MindFormerConfig, task: str, data: Sequence[Optional[str]], first_step: int = 0
    ) -> Dataset:
        datasets = []
        for path in data:
            own = copy.deepcopy(dataset_config)
            if path:
                name_data(own, path)
            datasets.append(build_dataset({"type": task, "dataset_config": own}))
            datasets[-1].set_init_step(first_step)
        # In this process, because the reader of the rows must continue where it was in each epoch.
        batches = Batches(datasets, first_step)
        columns = list(dataset_config.input_columns)
        return ms.dataset.GeneratorDataset(
            batches, columns, num_parallel_workers=1, shuffle=False, python_multiprocessing=False
        )


class Batches:
    """The batches of an epoch of several datasets, by number, from first to last; MindSpore requests them in order.

    Attributes:
        datasets (list of Dataset): Datasets of batches [rows, N], one for each adapter.
    """

    def __init__(self, datasets: List[Dataset], first_step: int):
        self.datasets = datasets
        self._step = first_step
        self._iterators = [without_end(dataset) for dataset in datasets]
        self._last: Tuple[np.ndarray, ...] = ()
        self._is_closed = False
        self._reading = threading.Lock()
        # When the process ends, MindSpore releases the datasets while one of its threads still reads ahead from them.
        atexit.register(self.close)

    def __len__(self) -> int:
        return max(dataset.get_dataset_size() for dataset in self.datasets)

    def __getitem__(self, number: int) -> Tuple[np.ndarray, ...]:
        with self._reading:
            is_next = self._step % len(self) == number or not self._last
            # Otherwise, a resumed run skips the batches that it has seen.
            if is_next and not self._is_closed:
                columns = zip(*(next(iterator) for iterator in self._iterators))
                self._last = tuple(np.stack(column, 1) for column in columns)
                self._step += 1
            return self._last

    def close(self) -> None:
        """Stops reading from the datasets: the last batch is returned from now on."""
        with self._reading:
            self._is_closed = True


def without_end(dataset: Dataset) -> Iterator[Tuple[np.ndarray, ...]]:
    """Yields the batches of one epoch after another."""
    epochs = dataset.create_tuple_iterator(num_epochs=_EPOCHS, output_numpy=True)
    while True:
        yield from epochs


def datasets_of(train_dataset: Dataset, count: int) -> List[Dataset]:
    """Returns the dataset of each adapter's run alone."""
    batches = getattr(train_dataset, "source", None)
    return batches.datasets if isinstance(batches, Batches) else [train_dataset] * count


def name_data(dataset_config: MindFormerConfig, path: str) -> None:
    """Makes a run read its data from a MindRecord, or a folder of them."""
    dataset_config["data_loader"].pop("dataset_files", None)
    dataset_config["data_loader"]["dataset_dir"] = path


def steps_in_epoch(dataset_config: MindFormerConfig, path: str, batch_size: int) -> int:
    """Returns the number of complete batches in a MindRecord, or a folder of them."""
    samples = dataset_config["data_loader"].get("num_samples")
    rows = ms.dataset.MindDataset(mindrecord_files(path), num_samples=samples).get_dataset_size()
    return rows // batch_size
