"""The exchange of the largest gradients on one rank alone, whose sum is what it sends itself."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.training.exchange import Ranks, TopKExchange
from tests.support.exchange_step import Step

NOT_SKIPPED = Tensor(0.0)


class Identity(nn.Cell):
    def construct(self, x):
        return x


class Alone(Ranks):
    def all_reduce(self):
        return Identity()


def gradients(size, count=4):
    return np.random.default_rng(size).normal(size=(count, size)).astype(np.float32)


def test_every_gradient_is_sent_in_the_end(mode):
    """Sent and unsent add up to what was given; an element that was chosen leaves nothing behind."""
    exchange = TopKExchange(50, Alone(0, 1), [(0, 0.1)], protected=[(10, 13), (48, 50)])
    step, given, sent = Step(exchange), np.zeros(50), np.zeros(50)
    is_open = np.ones(50, bool)
    is_open[10:13] = is_open[48:50] = False
    for flat in gradients(50):
        total = step(Tensor(flat), NOT_SKIPPED)[0].asnumpy()
        assert (total[~is_open] == flat[~is_open]).all()
        assert (total[is_open] != 0).sum() == round(0.1 * 45)
        unsent = exchange.unsent().asnumpy()
        assert (unsent[total[is_open] != 0] == 0).all()
        given, sent = given + flat, sent + total
        np.testing.assert_allclose((given - sent)[is_open], unsent, atol=1e-6)


def test_without_feedback_nothing_is_kept(mode):
    exchange = TopKExchange(50, Alone(0, 1), [(0, 0.1)], feedback=False)
    step = Step(exchange)
    for flat in gradients(50):
        total = step(Tensor(flat), NOT_SKIPPED)[0].asnumpy()
        assert (total[total != 0] == flat[total != 0]).all() and (total != 0).sum() == 5
    assert (exchange.unsent().asnumpy() == 0).all()


def test_stages_follow_each_other(mode):
    exchange = TopKExchange(40, Alone(0, 1), [(0, 1.0), (1, 0.5), (3, 0.1)])
    step, sent, counted = Step(exchange), [], []
    for flat in gradients(40, 5):
        sent.append((step(Tensor(flat), NOT_SKIPPED)[0].asnumpy() != 0).sum())
        counted.append(exchange.bytes_per_step)
    assert sent == [40, 20, 20, 4, 4] and exchange.steps_done() == 5
    assert counted == [exchange.bytes_at(number) for number in range(5)]


@pytest.mark.parametrize("protected", [[(0, 6)], [(0, 2), (2, 6)]])
def test_where_all_is_protected_all_is_sent(protected, mode):
    exchange = TopKExchange(6, Alone(0, 1), [(0, 1.0), (1, 0.1)], protected)
    step = Step(exchange)
    for flat in gradients(6):
        assert (step(Tensor(flat), NOT_SKIPPED)[0].asnumpy() == flat).all()
    assert exchange.steps_done() == 4
