"""The dropout of LoRADense: when it is on, what it drops, and that the backward drops the same elements."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense
from mindlora.ops.lora_dropout import LoraDeltaWithDropout
from tests.support.lora_dense import ALPHA, IN, IN_GRAPH_MODE, OUT, RANK, adapted, oracle
from tests.support.networks import WeightedSum, assert_close, normal

DROP = LoraConfig(lora_rank=6, lora_alpha=6, lora_dropout=0.25, lora_a_init="identity", lora_b_init="identity")


def mask_cell():
    """A cell that returns what its dropout leaves of x: W is zero, A and B are the identity."""
    return LoRADense.from_dense(nn.Dense(6, 6, weight_init="zeros", has_bias=False), DROP)


def test_dropout_is_off_in_evaluation(mode):
    dense = nn.Dense(IN, OUT)
    lora = adapted(dense, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, lora_dropout=0.5))
    lora.set_train(False)
    x = normal(3, IN)
    assert_close(lora(Tensor(x)), oracle(lora, x))


def test_dropout_drops_its_share_and_keeps_the_mean(mode):
    cell = mask_cell().set_train()
    x = Tensor(np.ones((2000, 6), np.float32))
    first, second = cell(x).asnumpy(), cell(x).asnumpy()
    for y in (first, second):
        np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75], rtol=1e-6)
        assert abs((y == 0).mean() - 0.25) < 0.02  # five standard deviations
        assert abs(y.mean() - 1) < 0.03
    assert (first != second).any()


def test_dropout_is_on_the_low_rank_path_alone(mode):
    dense = nn.Dense(IN, OUT)
    lora = LoRADense.from_dense(dense, LoraConfig(lora_rank=RANK, lora_dropout=0.9)).set_train()
    x = Tensor(normal(50, IN))
    np.testing.assert_array_equal(lora(x).asnumpy(), dense(x).asnumpy())


def test_the_backward_drops_what_the_forward_dropped(mode):
    cell = mask_cell().set_train()
    x = np.ones((50, 6), np.float32)
    y, of_x = ms.value_and_grad(WeightedSum(cell))(Tensor(x), Tensor(x))
    assert set(np.unique(np.round(of_x.asnumpy(), 4))) == {0, np.float32(1.3333)}
    assert_close(y, of_x.asnumpy().sum())


def test_without_dropout_there_is_no_cell_for_it():
    def holds_dropout(cell):
        return any(isinstance(child, LoraDeltaWithDropout) for _, child in cell.cells_and_names())

    assert not holds_dropout(LoRADense(IN, OUT, RANK, ALPHA))
    assert holds_dropout(LoRADense(IN, OUT, RANK, ALPHA, 0.1))


def test_each_cell_and_each_call_drops_other_elements(mode):
    ms.set_seed(5)
    cells, x = [mask_cell().set_train() for _ in range(2)], Tensor(np.ones((50, 6), np.float32))
    assert len({(cell(x).asnumpy() == 0).tobytes() for cell in cells for _ in range(2)}) == 4


@IN_GRAPH_MODE
def test_a_recomputed_forward_drops_what_the_forward_dropped(mode):
    network = nn.SequentialCell(mask_cell(), mask_cell()).set_train()
    network.recompute()
    x = np.ones((50, 6), np.float32)
    y, of_x = ms.value_and_grad(WeightedSum(network))(Tensor(x), Tensor(x))
    assert_close(y, of_x.asnumpy().sum())  # the network is linear, so y is x * dy/dx
