"""An adapter on the embedding of MindFormers' mcore models: what it computes, whole and sharded, and its layouts."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig
from mindlora.core.errors import UnsupportedCellError
from mindlora.network.cells.embedding import LoRAParallelEmbedding
from mindlora.network.registry import kind_of
from tests.support.networks import WeightedSum, as_array, assert_close, normal, randomize
from tests.support.parallel_cells import ALPHA, RANK, SCALE, eight_devices, layers, layouts, transformer_config

pytestmark = pytest.mark.usefixtures("mindformers", "graph_mode")

ROWS, DIM = 12, 6
CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)
IDS = np.array([[1, 2, 11, 2], [2, 0, 1, 7]], np.int32)


def embedding(config=None):
    return layers().VocabParallelEmbedding(
        ROWS, DIM, lambda shape: Tensor(normal(*shape, seed=1)), config or transformer_config()
    )


def adapted(cell, **keys):
    config = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, **keys)
    lora = kind_of(cell, config).from_cell(cell, config)
    randomize(lora.lora_parameters(), seed=2)
    return lora


def check(lora, parts="AB"):
    """Compares values, and the gradients of ``parts``, with the oracle: y = (W + scale (B A)^T)[ids]."""
    a, b = map(as_array, lora.lora_parameters())
    assert_close(lora(Tensor(IDS)), (as_array(lora.weight) + SCALE * (b @ a).T)[IDS])
    weights = normal(*IDS.shape, DIM, seed=3)
    slope = np.zeros((ROWS, DIM))
    np.add.at(slope, IDS.reshape(-1), weights.reshape(-1, DIM))
    expected = {"A": SCALE * (slope @ b).T, "B": SCALE * (a @ slope).T}
    trained = [parameter for part, parameter in zip("AB", lora.lora_parameters()) if part in parts]
    gradients = ms.grad(WeightedSum(lora), None, trained)(Tensor(IDS), Tensor(weights))
    for part, gradient in zip(parts, gradients):
        assert_close(gradient, expected[part])


def test_it_computes_what_the_adapter_of_other_embeddings_computes():
    cell = embedding()
    lora = LoRAParallelEmbedding.from_cell(cell, CONFIG)
    assert lora.weight is cell.weight and lora.sharded is None
    np.testing.assert_array_equal(lora(Tensor(IDS)).asnumpy(), as_array(cell.weight)[IDS])
    check(adapted(embedding()))


def test_a_sharded_embedding_computes_the_same(monkeypatch):
    with eight_devices(monkeypatch, data=8, context=1, model=1) as config:
        lora = adapted(embedding(config))
    assert lora.sharded is not None
    # A CPU has no kernel for the gradient of MindFormers' lookup.
    check(lora, "B")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_is_split_as_the_table_is_and_b_is_whole(monkeypatch, sequence_parallel):
    with eight_devices(monkeypatch) as config:
        config.sequence_parallel = sequence_parallel
        cell = embedding(config)
        lookup = adapted(cell).sharded
    ids, table = layouts(cell.embedding_morph)
    assert (ids, table) == ((2, 2), (2, 1))
    assert layouts(lookup.rows) == layouts(lookup.rows_of_a) == [ids, table]
    assert layouts(lookup.transpose) == [(1, 2)]
    out = (2, 4, 1) if sequence_parallel else (2, 2, 1)
    assert layouts(lookup.product) == [out, (1, 1)] and layouts(lookup.sum) == [out] * 2
    assert not list(lookup.get_parameters())


def test_variants_are_refused_on_it():
    with pytest.raises(UnsupportedCellError, match="use_dora"):
        adapted(embedding(), use_dora=True)
