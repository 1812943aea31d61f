"""TokenGradients against numpy: every counted token of a batch weighs the same, in one micro-batch or in several."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor, nn

from mindlora.core.errors import ConfigError
from mindlora.training.step.token_gradients import TokenGradients

ROWS, LENGTH, SIZE = 12, 5, 3


class CountingLoss(nn.Cell):
    """The sum over counted positions of (x . w - target)^2, and how many count; or their quotient."""

    def __init__(self, is_mean=False, dtype=ms.float32):
        super().__init__()
        self.weight = ms.Parameter(Tensor([0.5, -1.0, 2.0], dtype), name="weight")
        self.bias = ms.Parameter(Tensor([0.25], dtype), name="bias")
        self.is_mean = is_mean

    def construct(self, x, target, counted):
        y = (x * self.weight.astype(ms.float32)).sum(-1) + self.bias.astype(ms.float32)
        total, count = ((y - target) ** 2 * counted).sum(), counted.sum()
        if self.is_mean:
            return total / count
        return total, count


@pytest.fixture(scope="module")
def batch():
    """x, target, and which positions count: fewer in later rows, so that micro-batches count differently."""
    rng = np.random.default_rng(0)
    counted = rng.random((ROWS, LENGTH)) < np.linspace(0.95, 0.15, ROWS)[:, None]
    x, target = rng.normal(size=(ROWS, LENGTH, SIZE)), rng.normal(size=(ROWS, LENGTH))
    return x.astype(np.float32), target.astype(np.float32), counted.astype(np.float32)


def expected(x, target, counted):
    """The oracle: sum, count, and the gradients of the sum."""
    difference = (x @ np.array([0.5, -1.0, 2.0]) + 0.25 - target) * counted
    return (difference**2).sum(), counted.sum(), (2 * difference[..., None] * x).sum((0, 1)), 2 * difference.sum()


def cell_of(network, micro_batches):
    return TokenGradients(network, ParameterTuple(network.trainable_params()), micro_batches)


def run(cell, batch, scale=1.0):
    total, count, gradients = cell(Tensor(scale, ms.float32), *map(Tensor, batch))
    return [total.asnumpy(), count.asnumpy(), *(gradient.asnumpy() for gradient in gradients)]


@pytest.mark.parametrize("mode, micro_batches", [(0, 1), (0, 3), (1, 1), (1, 3), (1, 4)], indirect=["mode"])
def test_a_batch_in_parts_gives_what_it_gives_whole(mode, batch, micro_batches):
    cell = cell_of(CountingLoss(), micro_batches)
    found = run(cell, batch)
    for array, value in zip(found, expected(*batch)):
        np.testing.assert_allclose(array, value.reshape(array.shape), rtol=2e-6)
    scaled = run(cell, batch, scale=0.5)
    np.testing.assert_allclose(scaled[2], found[2] / 2, rtol=1e-6)
    np.testing.assert_allclose(scaled[0], found[0], rtol=1e-6)


def test_several_micro_batches_add_up_in_float32(mode, batch):
    found = run(cell_of(CountingLoss(dtype=ms.float16), 3), batch)
    assert found[2].dtype == np.float32
    np.testing.assert_allclose(found[2], expected(*batch)[2], rtol=3e-3)


def test_means_weigh_each_micro_batch_alike(mode, batch):
    """What a network that counts no tokens gets: the sum of the means, which is another gradient."""
    parts = [expected(*(array[rows] for array in batch)) for rows in (slice(0, 6), slice(6, 12))]
    found = run(cell_of(CountingLoss(is_mean=True), 2), batch)
    assert found[1] == 2
    np.testing.assert_allclose(found[2], sum(part[2] / part[1] for part in parts), rtol=1e-5)
    total = expected(*batch)
    assert np.abs(found[2] / 2 - total[2] / total[1]).max() > 0.01


def test_a_batch_that_cannot_be_split_is_refused(mode, batch):
    with pytest.raises(ConfigError, match="12 rows, which cannot be split into 5 micro-batches") as caught:
        run(cell_of(CountingLoss(), 5), batch)
    assert "train_dataset.drop_remainder: True" in str(caught.value)


def test_a_dry_run_which_ends_no_loop_takes_one_micro_batch(batch, monkeypatch):
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    cell = cell_of(CountingLoss(), 3)
    monkeypatch.delenv("MS_SIMULATION_LEVEL")
    total, count, _ = cell(Tensor(1.0, ms.float32), *map(Tensor, batch))
    first = expected(*(array[: ROWS // 3] for array in batch))
    np.testing.assert_allclose((float(total), float(count[0])), first[:2], rtol=2e-6)
