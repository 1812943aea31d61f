"""merge_and_unload: the plain cells are back, with the adapters in their weights."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora
from mindlora.network.merge import merge_and_unload, merge_lora, unmerge_lora
from mindlora.network.tree import lora_cells
from tests.support.merged_networks import CONFIG, Pair, adapted, folded, pair_forward
from tests.support.networks import as_array, assert_close, lora_forward, normal, randomize, snapshot


class OtherDense(nn.Dense):
    """A class of its own with nn.Dense's forward."""


def test_unloading_brings_the_plain_cells_back(mode, tmp_path):
    network = Pair()
    network.second = OtherDense(5, 3, activation="relu")
    plain = {path: (type(cell), repr(cell)) for path, cell in network.cells_and_names()}
    names = [p.name for p in network.get_parameters()]
    adapted(network)
    # Until then, the plain cells that the adapters keep are not visible anywhere.
    assert not any(isinstance(cell, nn.Dense) for _, cell in network.cells_and_names())
    ms.save_checkpoint(network, str(tmp_path / "all.ckpt"))
    assert len(ms.load_checkpoint(str(tmp_path / "all.ckpt"))) == len(list(network.get_parameters())) == len(names) + 4
    x, cell, weights = normal(4, 7), network.first, [folded(network.first), folded(network.second)]
    expected = np.maximum(pair_forward(network, x, *weights), 0)
    assert_close(network(Tensor(x)), expected)
    report = merge_and_unload(network, Tensor(x))
    assert {path: (type(cell), repr(cell)) for path, cell in network.cells_and_names()} == plain
    assert [p.name for p in network.get_parameters()] == names
    assert report.merged == ("first", "second") and report.output_difference is not None
    assert report.before_merge_bytes == 0 and cell.before_merge is None  # which would keep another base in memory
    assert_close(network(Tensor(x)), expected)
    network.set_train()
    apply_lora(network, CONFIG)  # and again


class Shared(nn.Cell):
    """One linear cell under three parents, one of them a SequentialCell, and another linear cell."""

    def __init__(self):
        super().__init__()
        self.again = nn.Dense(6, 6)
        self.sequence, self.list = nn.SequentialCell(self.again, nn.ReLU()), nn.CellList([self.again, nn.Dense(6, 6)])

    def construct(self, x):
        return self.again(self.list[1](self.list[0](self.sequence(x))))


def test_sequences_lists_and_shared_cells_are_unloaded(mode):
    network = adapted(Shared())
    y = x = normal(2, 6)
    for step, cell in enumerate([network.again, network.again, network.list[1], network.again]):
        y = y @ folded(cell).T + as_array(cell.bias)
        y = np.maximum(y, 0) if step == 0 else y
    assert_close(network(Tensor(x)), y)
    assert len(merge_and_unload(network).merged) == 2
    assert network.again is network.sequence[0] is network.list[0] is network.sequence.cell_list[0]
    assert isinstance(network.again, nn.Dense) and isinstance(network.list[1], nn.Dense)
    assert_close(network(Tensor(x)), y)


def test_what_changed_after_apply_lora_is_the_plain_cell_s_too():
    network, other = adapted(Pair()), nn.Dense(7, 5)
    network.first.weight = other.weight
    network.first.recompute()
    network.second.pipeline_stage = 1
    merge_and_unload(network)
    assert network.first.weight is other.weight and network.first.get_scope() == "recompute_"
    assert network.second.pipeline_stage == 1


@pytest.mark.parametrize("call, kind", [(merge_lora, "LoRADense"), (merge_and_unload, "Linear")])
def test_the_update_goes_before_the_activation_of_a_linear_cell(mode, mindformers, call, kind):
    linear = mindformers.modules.layers.Linear(7, 5, activation="silu", compute_dtype=ms.float32)
    network, x = adapted(nn.SequentialCell(linear)), normal(4, 7)
    weight, (a, b) = folded(network[0]), (as_array(p) for p in network[0].lora_parameters())
    expected = lora_forward(x, as_array(linear.weight), a, b, 1.5, as_array(linear.bias))
    expected = expected / (1 + np.exp(-expected))
    assert_close(network(Tensor(x)), expected)
    call(network)
    assert type(network[0]).__name__ == kind
    assert_close(network[0].weight, weight)
    assert_close(network(Tensor(x)), expected)


def test_a_llama_is_merged_unmerged_and_unloaded(mode, make_llama):
    network = make_llama(num_layers=1)
    plain = [(p.name, p.shape) for p in network.get_parameters()]
    kinds = {path: type(cell) for path, cell in network.cells_and_names()}
    apply_lora(network, LoraConfig(lora_rank=4, lora_alpha=8, target_modules="all-linear"))
    randomize([cell.mindpet_delta_lora_b for _, cell in lora_cells(network)])
    network.set_train(False)
    # Without token 0, the padding: its row of attention scores is masked whole, and rounding alone decides there.
    tokens, before = Tensor(np.arange(1, 17, dtype=np.int32)[None]), snapshot(network)
    logits = network(tokens)[0].asnumpy()
    report = merge_lora(network, tokens)
    assert len(report.merged) == 7 and report.output_difference <= report.output_bound
    np.testing.assert_allclose(network(tokens)[0].asnumpy(), logits, rtol=0, atol=1e-4 * np.abs(logits).max())
    unmerge_lora(network)
    np.testing.assert_array_equal(network(tokens)[0].asnumpy(), logits)
    assert snapshot(network) == before
    merge_and_unload(network, tokens)
    assert [(p.name, p.shape) for p in network.get_parameters()] == plain
    assert {path: type(cell) for path, cell in network.cells_and_names()} == kinds
    np.testing.assert_allclose(network(tokens)[0].asnumpy(), logits, rtol=0, atol=1e-4 * np.abs(logits).max())
