"""Adapters on the linear cells of MindFormers' mcore models: what they compute, take over, return and refuse."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, apply_lora, freeze_base, merge_and_unload, merge_lora, quantize_base, unmerge_lora
from mindlora.core.errors import UnsupportedCellError
from mindlora.core.numerics.nf4 import dequantize
from mindlora.network.cells import parallel_linear
from mindlora.network.cells.parallel_linear import NF4ParallelLinear, ParallelLowRank, ShardedBase
from mindlora.network.quantized.nf4 import nf4_array
from mindlora.network.registry import kind_of
from mindlora.network.variants.dora import row_norms
from tests.conftest import in_mode
from tests.support.networks import assert_close, normal, randomize
from tests.support.parallel_cells import (
    ALPHA,
    BIASES,
    IN,
    KINDS,
    OUT,
    RANK,
    SCALE,
    Outputs,
    eight_devices,
    inputs,
    layouts,
    linear,
    parallel_cell,
    transformer_config,
)

pytestmark = pytest.mark.usefixtures("mindformers", "graph_mode")

CONFIG = LoraConfig(lora_rank=RANK, lora_alpha=ALPHA)


def adapted(cell, **keys):
    """Returns ``cell`` with an adapter whose parameters are random."""
    alpha = {} if {"use_vera", "use_miss"} & set(keys) else {"lora_alpha": ALPHA}
    config = LoraConfig(**{"lora_rank": RANK, **alpha, **keys})
    lora = kind_of(cell, config).from_cell(cell, config)
    randomize(lora.lora_parameters(), seed=3)
    return lora


def delta(x, lora):
    """Returns ((x A^T) scale) B^T in NumPy."""
    a, b = lora.pair()
    return (x.astype(np.float64) @ a.T * SCALE) @ b.T


# What they compute ----------------------------------------------------------------------------------------------


def test_every_kind_adds_its_low_rank_product_to_what_the_plain_cell_computes():
    x = inputs()
    plain = [parallel_cell(kind, **bias) for kind in KINDS for bias in BIASES.values()]
    loras = [adapted(cell) for cell in plain]
    for cell, lora, y in zip(plain, loras, Outputs(*loras)(Tensor(x))):
        assert_close(y.asnumpy(), linear(x, cell) + delta(x, lora))


def test_variants_compute_what_they_compute_on_other_linear_cells():
    x = inputs()
    dora, vera = adapted(parallel_cell(), use_dora=True), adapted(parallel_cell(**BIASES["adds"]), use_vera=True)
    quantized = NF4ParallelLinear.from_dense(parallel_cell("RowParallelLinear", **BIASES["returns"]))
    weight, bias = dequantize(nf4_array(quantized)), quantized.bias.asnumpy()
    qlora = adapted(quantized)
    adaptive = adapted(parallel_cell(), use_adalora=True, init_r=RANK, target_r=1)
    miss = adapted(parallel_cell(), use_miss=True)
    network = Outputs(dora, vera, quantized, qlora, adaptive, miss)
    network.set_train(False)
    y_dora, y_vera, y_quantized, y_qlora, y_adaptive, y_miss = (y.asnumpy() for y in network(Tensor(x)))
    w, (a, b) = dora.weight.asnumpy(), dora.pair()
    gain = dora.mindpet_delta_lora_magnitude.asnumpy() / row_norms(w, a, b, SCALE)
    assert_close(y_dora, gain * (x @ w.T + delta(x, dora)))
    a, b = vera.pair()
    assert_close(y_vera, linear(x, vera) + (x @ a.T) @ b.T)
    assert_close(y_quantized, x @ weight.T + bias)
    assert_close(y_qlora, x @ weight.T + bias + delta(x, qlora))
    assert_close(y_adaptive, linear(x, adaptive) + delta(x, adaptive))
    a, b = miss.pair()
    assert_close(y_miss, linear(x, miss) + (x @ a.T) @ b.T)


def test_variants_compute_the_same_on_cells_in_few_bits_as_on_what_these_decode_to():
    settings = [{"use_dora": True}, {"use_vera": True}, {"use_adalora": True, "init_r": RANK, "target_r": 1}]
    settings.append({"use_miss": True})
    packed, decoded, x = [], [], inputs()
    for keys, kind in zip(settings, [*KINDS, *KINDS]):
        for bias in BIASES.values():
            quantized = NF4ParallelLinear.from_dense(parallel_cell(kind, **bias))
            packed.append(adapted(quantized, **keys))
            decoded.append(adapted(quantized.plain_cell(), **keys))
    outputs = Outputs(*packed).set_train(False)(Tensor(x))
    assert all(cell.quantization == "nf4" for cell in packed) and not any(cell.quantization for cell in decoded)
    with in_mode(ms.PYNATIVE_MODE):
        expected = Outputs(*decoded).set_train(False)(Tensor(x))
    for found, wanted in zip(outputs, expected):
        assert_close(found.asnumpy(), wanted.asnumpy().astype(np.float64))


def test_the_low_rank_path_of_a_sharded_cell_computes_the_same():
    x = inputs()
    loras = [adapted(parallel_cell(kind)) for kind in KINDS]
    paths = [ParallelLowRank(lora.plain_cell(), RANK, 0.0) for lora in loras]
    y = np.stack([linear(x, lora) for lora in loras]).astype(np.float32)
    for after, before, lora in zip(AddedTo(paths, loras)(Tensor(y), Tensor(x)), y, loras):
        assert_close(after.asnumpy(), before + delta(x, lora))


class AddedTo(nn.Cell):
    """Calls add_to of low-rank paths, with the A and B of cells."""

    def __init__(self, paths, loras):
        super().__init__(auto_prefix=False)
        self.paths, self.loras = nn.CellList(paths), nn.CellList(loras)

    def construct(self, y, x):
        outputs = ()
        for index, path in enumerate(self.paths):
            lora = self.loras[index]
            outputs += (path.add_to(y[index], x, lora.mindpet_delta_lora_a, lora.mindpet_delta_lora_b, SCALE),)
        return outputs


def test_a_compute_dtype_of_the_base_holds_for_the_low_rank_path_and_y_has_the_dtype_of_x():
    x = inputs()
    lora = adapted(parallel_cell(config=transformer_config(compute_dtype="float16")))
    assert lora.dtype == ms.float16
    (y,) = Outputs(lora)(Tensor(x))
    assert y.dtype == ms.float32
    expected = linear(x, lora) + delta(x, lora)
    assert_close(y.asnumpy(), expected, "float16")
    assert np.abs(y.asnumpy() - expected).max() > 1e-5


# What they take over --------------------------------------------------------------------------------------------


def test_the_base_keeps_its_parameters_its_operators_and_its_values():
    cell = parallel_cell(bias=True)
    before = cell.weight.asnumpy().copy(), cell.bias.asnumpy().copy()
    lora = adapted(cell)
    assert lora.weight is cell.weight and lora.bias is cell.bias
    assert lora.base.matmul is cell.matmul
    assert [p.name for p in lora.get_parameters()] == ["weight", "bias", "mindpet_delta_lora_a", "mindpet_delta_lora_b"]
    assert all(np.array_equal(now.asnumpy(), then) for now, then in zip((lora.weight, lora.bias), before))
    assert lora.plain_cell() is cell


def test_dropout_trains_no_state_and_drops_only_in_training():
    lora = adapted(parallel_cell(), lora_dropout=0.5)
    network = Outputs(lora)
    freeze_base(network)
    assert [p.name for p in network.trainable_params()] == [p.name for p in lora.lora_parameters()]
    assert all(p.dtype == ms.float32 for p in network.get_parameters())
    x = inputs(tokens=16)
    network.set_train(False)
    assert_close(network(Tensor(x))[0].asnumpy(), linear(x, lora) + delta(x, lora))
    network.set_train(True)
    first, second = network(Tensor(x))[0].asnumpy(), network(Tensor(x))[0].asnumpy()
    assert np.abs(first - second).max() > 0.1


# In a network ---------------------------------------------------------------------------------------------------


def test_it_is_put_on_frozen_merged_unmerged_and_taken_off_again():
    network, x = Outputs(parallel_cell(), parallel_cell("RowParallelLinear", **BIASES["returns"])), Tensor(inputs())
    network.set_train(False)
    apply_lora(network, LoraConfig(target_modules="all-linear", lora_rank=RANK, lora_alpha=ALPHA))
    freeze_base(network)
    assert len(network.trainable_params()) == 4
    randomize(network.trainable_params(), seed=4)
    before = [y.asnumpy() for y in network(x)]
    merge_lora(network)
    for y, expected in zip(network(x), before):
        assert_close(y.asnumpy(), expected)
    unmerge_lora(network)
    for y, expected in zip(network(x), before):
        assert np.array_equal(y.asnumpy(), expected)
    merge_and_unload(network)
    assert [type(cell).__name__ for cell in network.cells_in_turn] == ["ColumnParallelLinear", "RowParallelLinear"]
    for y, expected in zip(network(x), before):
        assert_close(y.asnumpy(), expected)


def test_a_quantized_base_takes_an_adapter_and_is_merged_in_float():
    network, x = Outputs(parallel_cell(), parallel_cell("RowParallelLinear")), Tensor(inputs())
    assert quantize_base(network) == ("cells_in_turn.0", "cells_in_turn.1")
    config = LoraConfig(target_modules=["cells_in_turn.1"], lora_rank=RANK, lora_alpha=ALPHA)
    apply_lora(network, config)
    freeze_base(network)
    randomize(network.trainable_params(), seed=4)
    network.set_train(False)
    before = [y.asnumpy() for y in network(x)]
    merge_and_unload(network)
    assert [type(cell).__name__ for cell in network.cells_in_turn] == ["NF4ParallelLinear", "RowParallelLinear"]
    for y, expected in zip(network(x), before):
        assert_close(y.asnumpy(), expected)


# Sharding -------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_eight_devices(monkeypatch):
    with eight_devices(monkeypatch) as config:
        yield config


# Kind -> (layouts of x and A, layouts of the product and B), and of the sum's operands: [sequence, batch, channels].
SHARDED = {
    "ColumnParallelLinear": ([(2, 2, 1), (1, 1)], [(2, 2, 1), (2, 1)], (2, 2, 2)),
    "RowParallelLinear": ([(2, 2, 2), (1, 2)], [(2, 2, 1), (1, 1)], (2, 2, 1)),
    "LinearNoTP": ([(2, 2, 1), (1, 1)], [(2, 2, 1), (1, 1)], (2, 2, 1)),
    "SequenceParallelLinear": ([(4, 2, 1), (1, 1)], [(4, 2, 1), (1, 1)], (4, 2, 1)),
}


@pytest.mark.parametrize("kind", SHARDED)
def test_a_and_b_are_sharded_as_in_mindformers_own_lora(kind, on_eight_devices):
    lora = adapted(parallel_cell(kind, on_eight_devices), lora_dropout=0.1)
    of_a, of_b, of_sum = SHARDED[kind]
    path = lora.low_rank
    assert isinstance(lora.base, ShardedBase) and lora.base.morphed_forward is lora.base_cell.morphed_forward
    assert isinstance(path, ParallelLowRank) and lora.choice.path == "composed"
    assert layouts(path.a_product) == of_a and layouts(path.b_product) == of_b
    assert layouts(path.sum) == [of_sum] * 2
    # Numbers: MindSpore's Dropout refuses a Layout.
    assert path.dropout.dropout.in_strategy == tuple(of_a[:1])
    assert not path.trainable_params() and not list(path.get_parameters())


@pytest.mark.parametrize("kind", KINDS[:2])
def test_these_layouts_are_those_of_mindformers_own_cells(kind, on_eight_devices):
    from mindformers.parallel_core.training_graph.tensor_parallel import lora_layers

    theirs = getattr(lora_layers, f"{kind}WithLoRA")(
        IN, OUT, on_eight_devices, lambda shape: Tensor(normal(*shape, seed=1)), bias=False, skip_bias_add=True
    )
    path = adapted(parallel_cell(kind, on_eight_devices)).low_rank
    assert layouts(path.a_product) == layouts(theirs.lora_A.morphed_forward)
    assert layouts(path.b_product) == layouts(theirs.lora_B.morphed_forward)


def test_with_sequence_parallelism_a_row_cells_sum_is_split_along_the_sequence(on_eight_devices):
    on_eight_devices.sequence_parallel = True
    path = adapted(parallel_cell("RowParallelLinear", on_eight_devices)).low_rank
    assert layouts(path.b_product) == [(4, 2, 1), (1, 1)] and layouts(path.sum) == [(4, 2, 1)] * 2


# What is refused ------------------------------------------------------------------------------------------------


def refused(cell, **keys):
    """Returns the message with which an adapter on ``cell`` is refused."""
    with pytest.raises(UnsupportedCellError) as error:
        adapted(cell, **keys)
    return str(error.value)


def test_cells_that_cannot_carry_an_adapter_are_refused():
    assert refused(parallel_cell(skip_weight_param_allocation=True)) == (
        "ColumnParallelLinear has no weight of its own. Put the adapter on the whole network (apply_lora), in which an "
        "output layer gets the embedding's table (tie_word_embeddings: True)."
    )
    assert refused(parallel_cell(transpose_b=False)) == (
        "ColumnParallelLinear keeps its weight as [in_channels, out_channels] (transpose_b False), but the adapter "
        "needs [out_channels, in_channels]. Add it to exclude_modules."
    )
    from mindformers.parallel_core.training_graph.tensor_parallel.lora_layers import ColumnParallelLinearWithLoRA

    theirs = ColumnParallelLinearWithLoRA(
        IN, OUT, transformer_config(), lambda shape: Tensor(normal(*shape, seed=1)), bias=False, skip_bias_add=True
    )
    assert refused(theirs) == (
        "ColumnParallelLinearWithLoRA has a forward of its own, which the adapter's cell would drop. Add it to "
        "exclude_modules."
    )
    quantized = NF4ParallelLinear.from_dense(parallel_cell())
    assert "lora_init 'olora' is not supported on quantized weights" in refused(quantized, lora_init="olora")
    with pytest.raises(UnsupportedCellError, match="adapters do not stack"):
        parallel_linear.LoRAParallelLinear.from_cell(adapted(parallel_cell()), CONFIG)


@pytest.mark.parametrize(
    "keys", [{"use_dora": True}, {"use_vera": True}, {"lora_init": "pissa"}], ids=lambda k: [*k][0]
)
def test_what_needs_whole_weights_is_refused_on_sharded_cells(keys, on_eight_devices):
    (field,) = keys
    message = refused(parallel_cell(config=on_eight_devices), **keys)
    assert message.startswith(field) and " is not supported on sharded " in message
    way_out = "set model_parallel: 1" if field == "lora_init" else "train in data parallel (parallel_mode: 0)"
    assert message.endswith(f"Leave {field} out, or {way_out}.")


def test_a_sharded_cell_is_not_quantized(on_eight_devices):
    with pytest.raises(UnsupportedCellError, match="is sharded, but NF4 weights are not supported there"):
        NF4ParallelLinear.from_dense(parallel_cell(config=on_eight_devices))
