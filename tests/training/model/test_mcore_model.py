"""What the plug-in puts around an mcore model: rows as the model takes them, and one loss of its several."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.core.errors import ConfigError
from mindlora.training.model.mcore_model import McoreLoss, McoreRows

pytestmark = pytest.mark.usefixtures("graph_mode")

N = 5
IDS, LABELS = (np.arange(2 * (N + 1), dtype=np.int32).reshape(2, N + 1) + begin for begin in (0, 100))


def test_a_row_of_one_token_more_loses_its_last_token_and_its_first_label():
    input_ids, labels = McoreRows(N)(Tensor(IDS), Tensor(LABELS))
    assert np.array_equal(input_ids.asnumpy(), IDS[:, :-1]) and np.array_equal(labels.asnumpy(), LABELS[:, 1:])


def test_a_row_of_the_models_length_stays_as_it_is():
    input_ids, labels = McoreRows(N + 1)(Tensor(IDS), Tensor(LABELS))
    assert np.array_equal(input_ids.asnumpy(), IDS) and np.array_equal(labels.asnumpy(), LABELS)


def test_a_row_of_any_other_length_is_an_error_that_names_both():
    with pytest.raises(ConfigError, match=r"rows of the data have 6 tokens, but the model's seq_length is 7"):
        McoreRows(N + 2)(Tensor(IDS), Tensor(LABELS))


class Losses(nn.Cell):
    """A network that returns multiples of its input, as many as an mcore model has losses."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def construct(self, x):
        losses = ()
        for index in range(self.count):
            losses += (x * 10**index,)
        return losses


@pytest.mark.parametrize(("count", "total"), [(3, 111), (4, 1111)], ids=["MindFormers 1.8", "MindFormers 1.9"])
def test_the_losses_are_added_up(count, total):
    loss = McoreLoss(Losses(count), counts_tokens=False)(Tensor([2.0], ms.float32))
    assert loss.asnumpy().tolist() == [2 * total]


@pytest.mark.parametrize(("count", "total"), [(5, 10101), (6, 110101)], ids=["MindFormers 1.8", "MindFormers 1.9"])
def test_numbers_of_tokens_are_not_added_to_sums_of_losses(count, total):
    loss, tokens = McoreLoss(Losses(count), counts_tokens=True)(Tensor([2.0], ms.float32))
    assert loss.asnumpy().tolist() == [2 * total] and tokens.asnumpy().tolist() == [20]
