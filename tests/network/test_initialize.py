"""initialize_adapters: initializations that change the base but not the output, and what is refused."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters

from mindlora import LoRADense, apply_lora, initialize_adapters, merge_lora, save_lora, unmerge_lora
from mindlora.core.errors import LoraError, UnsupportedCellError
from mindlora.core.numerics import initializers
from mindlora.network import tree
from tests.support import networks
from tests.support.initialized_networks import INITS, adapted, base, config, outputs, train
from tests.support.refusals import part, refused_unchanged

pytestmark = pytest.mark.usefixtures("pynative_mode")


# Initializing


@pytest.mark.parametrize("rslora", [False, True], ids=["alpha/r", "rslora"])
@pytest.mark.parametrize("init", INITS)
def test_initialization_fills_a_and_b_and_keeps_the_forward(init, rslora):
    plain, network = base(), adapted(init, use_rslora=rslora)
    weights = {path: cell.weight.asnumpy().copy() for path, cell in tree.lora_cells(network)}
    assert initialize_adapters(network) == tuple(weights)
    np.testing.assert_allclose(outputs(network), outputs(plain), atol=2e-5)
    for path, cell in tree.lora_cells(network):
        expected = initializers.of_base(init, weights[path], 3, cell.scale)
        for parameter, array in zip(cell.lora_parameters(), expected):
            np.testing.assert_array_equal(parameter.asnumpy(), array)
        np.testing.assert_allclose(
            cell.weight.asnumpy(), weights[path] - cell.scale * expected[1] @ expected[0], atol=1e-5
        )
        assert np.abs(cell.weight.asnumpy() - weights[path]).max() > 0.1


def test_in_both_modes(mode):
    network = adapted()
    expected = outputs(network)
    initialize_adapters(network)
    np.testing.assert_allclose(outputs(network), expected, atol=2e-5)


def test_a_graph_that_was_compiled_before_runs_on():
    ms.set_context(mode=ms.GRAPH_MODE)
    network = adapted()
    expected = outputs(network)
    initialize_adapters(network)
    np.testing.assert_allclose(outputs(network), expected, atol=2e-5)
    train(network)
    assert np.abs(outputs(network) - expected).max() > 0.01


def test_a_second_call_does_nothing():
    network = adapted()
    initialize_adapters(network)
    train(network)
    before = networks.snapshot(network)
    assert initialize_adapters(network) == ()
    assert networks.snapshot(network) == before


@pytest.mark.parametrize("init", [None, "kaiming", "gaussian", "orthogonal"])
def test_an_initialization_without_the_base_needs_no_call(init):
    network = adapted(init, lora_rank=2)
    before = networks.snapshot(network)
    assert initialize_adapters(network) == ()
    assert networks.snapshot(network) == before


def test_before_initialization_the_network_computes_as_the_base():
    np.testing.assert_array_equal(outputs(adapted()), outputs(base()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_and_b_in_half_precision(dtype):
    """The base makes up for A and B after their rounding."""
    network, plain = adapted(param_init_type=dtype, compute_dtype="float32"), base()
    initialize_adapters(network)
    np.testing.assert_allclose(outputs(network), outputs(plain), atol=2e-5)


@pytest.mark.parametrize("dtype, error", [(ms.float16, 2e-3), (ms.bfloat16, 2e-2)])
def test_a_base_in_half_precision(dtype, error):
    cell = nn.Dense(16, 12, has_bias=False, dtype=dtype)
    weight = networks.as_array(cell.weight)
    cell = LoRADense.from_dense(cell, config(lora_rank=4))
    initialize_adapters(cell)
    a, b = map(networks.as_array, cell.lora_parameters())
    assert cell.weight.dtype == dtype
    np.testing.assert_allclose(networks.as_array(cell.weight) + cell.scale * b @ a, weight, atol=error)


def test_patterns_give_each_cell_its_rank():
    network = adapted(rank_pattern={"wk": 2}, alpha_pattern={"w1": 9})
    expected = outputs(network)
    initialize_adapters(network)
    np.testing.assert_allclose(outputs(network), expected, atol=2e-5)
    assert {cell.lora_rank for _, cell in tree.lora_cells(network)} == {2, 3}


def test_dora_initializes_magnitudes_from_the_norms_of_the_base():
    network, plain = adapted(use_dora=True), base()
    network.set_train(True)
    initialize_adapters(network)
    np.testing.assert_allclose(outputs(network), outputs(plain), atol=2e-5)
    train(network)
    network.set_train(True)
    for _, cell in tree.lora_cells(network):
        cell.prepare()


# MiCA


def minor(seed=3):
    """Returns the base with adapters that MiCA has initialized, after training them, and their B before."""
    network = adapted("mica")
    initialize_adapters(network)
    before = {path: cell.mindpet_delta_lora_b.asnumpy().copy() for path, cell in tree.lora_cells(network)}
    train(network, seed)
    return network, before


def test_mica_keeps_base_and_forward_and_trains_a_alone():
    plain, network = base(), adapted("mica")
    weights = {path: cell.weight.asnumpy().copy() for path, cell in tree.lora_cells(network)}
    assert initialize_adapters(network) == tuple(weights)
    np.testing.assert_array_equal(outputs(network), outputs(plain))
    for path, cell in tree.lora_cells(network):
        a, b = (parameter.asnumpy() for parameter in cell.lora_parameters())
        np.testing.assert_array_equal(cell.weight.asnumpy(), weights[path])
        np.testing.assert_array_equal(b, initializers.mica(weights[path], 3)[1])
        assert not a.any() and cell.initial_pair is None
    assert {parameter.name.rpartition("_")[2] for parameter in network.trainable_params()} == {"a"}


def test_mica_stays_in_its_directions_when_it_is_called_again_and_while_it_is_merged():
    network, before = minor()
    state = networks.snapshot(network)
    assert initialize_adapters(network) == () and networks.snapshot(network) == state
    expected = outputs(network)
    assert np.abs(expected - outputs(base())).max() > 0.01
    merge_lora(network)
    assert initialize_adapters(network) == ()
    np.testing.assert_allclose(outputs(network), expected, atol=2e-5)
    unmerge_lora(network)
    for path, cell in tree.lora_cells(network):
        np.testing.assert_array_equal(cell.mindpet_delta_lora_b.asnumpy(), before[path])


def test_mica_reads_a_weight_that_another_cell_shares():
    network = base()
    network.model.layers[0].attention.wo.weight = network.model.layers[0].attention.wq.weight
    apply_lora(network, config("mica", target_modules=["wq"]))
    assert len(initialize_adapters(network)) == 2


def test_mica_does_not_keep_a_b_that_was_trained():
    network = adapted("mica")
    cell = network.model.layers[1].attention.wk
    cell.mindpet_delta_lora_b.set_data(Tensor(np.ones((4, 3), np.float32)))
    initialize_refused(
        network,
        "B at model.layers.1.attention.wk is trained, and not made of singular vectors as lora_init 'mica' makes and "
        "keeps it.",
    )


# What is refused


def initialize_refused(network, message, kind=LoraError):
    """Asserts that initialize_adapters is refused for ``network``, which stays as it was."""
    refused_unchanged(network, kind, part(message), initialize_adapters, network)


def test_a_network_without_adapters():
    initialize_refused(base(), "The network holds no LoRADense cell, so there is nothing to initialize.")


def test_a_trained_adapter_is_not_initialized_again():
    network = adapted()
    cell = network.model.layers[1].attention.wk
    cell.mindpet_delta_lora_b.set_data(Tensor(np.ones((4, 3), np.float32)))
    initialize_refused(
        network,
        "B is not zero at model.layers.1.attention.wk, which lora_init 'pissa' would overwrite: the "
        "base's checkpoint holds a trained adapter.",
    )


def test_a_weight_that_another_cell_shares():
    network = base()
    network.model.layers[0].attention.wo.weight = network.model.layers[0].attention.wq.weight
    apply_lora(network, config(target_modules=["wq"]))
    initialize_refused(network, "model.layers.0.attention.wq shares its weight with model.layers.0.attention.wo (")


def test_a_weight_with_nan():
    network = adapted()
    network.model.layers[0].attention.wq.weight.set_data(Tensor(np.full((6, 6), np.nan, np.float32)))
    initialize_refused(network, "The weight of model.layers.0.attention.wq holds NaN or infinity, so lora_init 'pissa'")


def test_weights_without_values():
    with no_init_parameters():
        network = networks.TinyModel(1)
        apply_lora(network, config())
    with pytest.raises(
        LoraError,
        match="^The weights of model.layers.0.attention.wq, .* have no values yet: load the base checkpoint before "
        "initialization by lora_init 'pissa'",
    ):
        initialize_adapters(network)


def test_a_part_of_a_weight():
    cell = LoRADense.from_dense(nn.Dense(6, 6, has_bias=False), config())
    cell.weight = ms.Parameter(Tensor(np.ones((3, 6), np.float32)), name="weight")
    with pytest.raises(LoraError, match=r"^The weight of the cell is a part of a sharded one, \[3, 6\], and lora_init"):
        initialize_adapters(cell)


def test_weights_of_a_dtype_that_is_no_float():
    cell = LoRADense.from_dense(nn.Dense(6, 6, has_bias=False), config())
    cell.weight.set_dtype(ms.int8)
    with pytest.raises(
        LoraError, match="^The weight of the cell is Int8: initialization by lora_init 'pissa' needs float32"
    ):
        initialize_adapters(cell)


def test_a_sharded_cell(semi_auto_parallel):
    cell = nn.Dense(8, 8, has_bias=False)
    cell.matmul.shard(((2, 1), (2, 1)))
    with pytest.raises(UnsupportedCellError, match="^lora_init 'orthogonal' is not supported on sharded weights"):
        LoRADense.from_dense(cell, config("orthogonal", lora_rank=2))
    assert LoRADense.from_dense(cell, config("gaussian")).lora_init == "gaussian"


@pytest.mark.parametrize("init", ["pissa", "mica"])
def test_saving_before_initialization(tmp_path, init):
    with pytest.raises(
        LoraError,
        match=rf"^lora_init '{init}' has not been carried out at model\.layers\.\{{0\.\.1\}}\."
        r"attention\.wq, .* Call initialize_adapters once the base is loaded",
    ):
        save_lora(adapted(init), str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter").exists()
