"""The batches of several adapters with data of their own, and the rows that each adapter gets of a batch."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.training.several.graph_mode import Batches
from mindlora.training.several.train_step import RowsOfAdapters
from tests.support import tiny_runs

ROWS = {"long": 24, "short": 16}


@pytest.fixture(scope="module")
def files(mindformers, tmp_path_factory):
    """MindRecords of 6 and 4 batches."""
    folder = tmp_path_factory.mktemp("data")
    for seed, (name, rows) in enumerate(ROWS.items()):
        tiny_runs.write_data(folder / f"{name}.mindrecord", rows, seed=seed)
    return [str(folder / f"{name}.mindrecord") for name in ROWS]


def dataset(path, skip=0):
    ms.dataset.config.set_seed(42)
    shuffled = ms.dataset.MindDataset(path, columns_list=["input_ids", "labels"], shuffle=True)
    shuffled = shuffled.batch(4, drop_remainder=True)
    shuffled.set_init_step(skip)
    return shuffled


def batches_of(data, epochs, steps):
    """Returns what the iterator of a run yields in its first steps."""
    iterator = data.create_tuple_iterator(num_epochs=epochs, output_numpy=True)
    found = []
    while len(found) < steps:
        found += [[column.copy() for column in batch] for batch in iterator]
    return found[:steps]


def together(files, skip=0):
    """Returns the batches of three epochs of both, from a step on."""
    batches = Batches([dataset(path, skip) for path in files], skip)
    data = ms.dataset.GeneratorDataset(batches, ["input_ids", "labels"], num_parallel_workers=1, shuffle=False)
    data.set_init_step(skip)
    assert data.get_dataset_size() == 6
    return batches_of(data, 3, 18 - skip)


def test_each_adapter_gets_the_batches_that_it_gets_alone(files):
    alone = [batches_of(dataset(path), 5, 18) for path in files]
    for step, batch in enumerate(together(files)):
        for column, array in enumerate(batch):
            for adapter in range(2):
                np.testing.assert_array_equal(array[:, adapter], alone[adapter][step][column])


@pytest.mark.parametrize("skip", [6, 8])
def test_a_resumed_run_goes_on_inside_the_data(files, skip):
    for batch, whole in zip(together(files, skip), together(files)[skip:]):
        np.testing.assert_array_equal(batch, whole)


@pytest.mark.usefixtures("pynative_mode")
def test_the_rows_of_a_batch_are_those_of_all_adapters_or_of_each_its_own():
    class Same(nn.Cell):
        def construct(self, x):
            return x

    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    rows = RowsOfAdapters(Same(), 2)
    np.testing.assert_array_equal(rows(Tensor(x[0])).asnumpy(), np.concatenate([x[0], x[0]]))
    np.testing.assert_array_equal(rows(Tensor(x)).asnumpy(), np.concatenate([x[:, 0], x[:, 1]]))
