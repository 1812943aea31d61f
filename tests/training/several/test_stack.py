"""AdapterStack: several adapters on one network, and each with a network of its own."""

import dataclasses

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.core.errors import UnsupportedCellError
from mindlora.network.cells.cell import InitialDraws
from mindlora.network.cells.stacked import StackedLoRADense
from mindlora.network.tree import lora_cells
from mindlora.training.preference.reference import reference_network
from mindlora.training.several.stack import pull, push, stack_adapters
from tests.conftest import in_mode
from tests.support import moe_networks
from tests.support.mcore_networks import tiny_qwen3
from tests.support.mcore_pynative import mcore_in_pynative
from tests.support.moe_cells import WeightedOutput
from tests.support.networks import TinyModel, as_array, normal, randomize

CONFIGS = (
    LoraConfig(lora_rank=4, target_modules=["wq", "w2"]),
    LoraConfig(lora_rank=2, lora_alpha=3, use_rslora=True, target_modules=["wq", "wk"]),
)


# Of the weights of moe_networks.experts_alone, by expert.
SHAPES = {
    "weight1": (-1, moe_networks.HIDDEN, 2 * moe_networks.INNER),
    "weight2": (-1, moe_networks.INNER, moe_networks.HIDDEN),
}


def network():
    model = TinyModel()
    randomize(model.get_parameters(), seed=5)
    return model


@pytest.fixture
def stack():
    """The network, and two adapters on it with random values."""
    model = network()
    stack = stack_adapters(model, CONFIGS)
    for number, own in enumerate(stack.networks):
        randomize(own.trainable_params(), seed=number)
        push(stack.slices(number))
    return model, stack


def test_only_the_adapters_train_and_the_base_is_there_once(stack):
    model, stack = stack
    trained = [parameter.name for parameter in model.trainable_params()]
    assert trained and all("mindpet_delta_lora" in name for name in trained)
    base = {id(p) for p in model.get_parameters() if not p.requires_grad}
    for own in stack.networks:
        assert {id(p) for p in own.get_parameters() if not p.requires_grad} <= base
    assert len(stack.cells) == 3 * len({path.split(".wq")[0] for path in stack.cells if path.endswith("wq")})
    assert all(isinstance(cell, StackedLoRADense) for cell in stack.cells.values())


def test_each_adapter_computes_what_it_computes_alone(stack):
    model, stack = stack
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    # The sums over rows in this model mix them, so each adapter is looked at cell by cell.
    for number, own in enumerate(stack.networks):
        for path, cell in lora_cells(own):
            both = stack.cells[path](Tensor(np.resize(x, (8, cell.in_channels))))
            alone = cell(Tensor(np.resize(x, (8, cell.in_channels))[4 * number :][:4]))
            np.testing.assert_allclose(as_array(both)[4 * number :][:4], as_array(alone), rtol=1e-5, atol=1e-6)


def test_on_a_base_in_4_bits_each_adapter_computes_what_it_computes_alone():
    configs = [dataclasses.replace(config, quantize_base="nf4") for config in CONFIGS]
    stack = stack_adapters(network(), configs)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    for number, config in enumerate(configs):
        alone = network()
        apply_lora(alone, config)
        randomize([p for _, cell in lora_cells(alone) for p in cell.lora_parameters()], seed=number)
        for path, cell in lora_cells(alone):
            own = dict(lora_cells(stack.networks[number]))[path]
            for part, parameter in zip(own.lora_parameters(), cell.lora_parameters()):
                part.set_data(parameter)
        push(stack.slices(number))
        for path, cell in lora_cells(alone):
            both = stack.cells[path]
            assert both.packed
            rows = np.resize(x, (8, cell.in_channels))
            expected = as_array(cell(Tensor(rows[4 * number :][:4])))
            found = as_array(both(Tensor(rows)))[4 * number :][:4]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_reference_has_none_of_the_adapters(stack):
    model, _ = stack
    reference, x = reference_network(model), Tensor(normal(4, 6))
    assert np.abs(as_array(model(x)) - as_array(reference(x))).max() > 0.1
    np.testing.assert_array_equal(as_array(reference(x)), as_array(network()(x)))


@pytest.mark.parametrize("base", [None, "nf4"], ids=["float", "nf4"])
def test_cells_of_an_mcore_model_take_rows_that_are_side_by_side(base, mindformers, graph_mode):
    configs = [
        LoraConfig(lora_rank=rank, target_modules=["linear_proj", "linear_fc2"], quantize_base=base) for rank in (4, 2)
    ]
    stack = stack_adapters(tiny_qwen3(), configs)
    for number, (config, own) in enumerate(zip(configs, stack.networks)):
        randomize(own.trainable_params(), seed=number)
        push(stack.slices(number))
        alone = tiny_qwen3()
        apply_lora(alone, config)
        randomize([p for _, cell in lora_cells(alone) for p in cell.lora_parameters()], seed=number)
        for path, cell in lora_cells(alone):
            # Two rows of five tokens for each adapter.
            x = np.random.default_rng(0).normal(size=(5, 4, cell.in_channels)).astype(np.float32)
            mine = np.ascontiguousarray(x[:, 2 * number :][:, :2])
            with in_mode(1):
                found = as_array(stack.cells[path](Tensor(x))[0])
                expected = as_array(cell(Tensor(mine))[0])
            np.testing.assert_allclose(found[:, 2 * number :][:, :2], expected, rtol=1e-4, atol=1e-5)


@mcore_in_pynative()
def test_experts_compute_and_differentiate_for_each_adapter_as_with_its_own_weights(mindformers):
    configs = [
        LoraConfig(target_parameters=["mlp.experts"], lora_rank=2, lora_alpha=3),
        LoraConfig(target_parameters=["experts.down_proj"], lora_rank=3, lora_alpha=1),
    ]
    network = moe_networks.experts_alone()
    stack = stack_adapters(network, configs)
    for number, own in enumerate(stack.networks):
        randomize(own.trainable_params(), seed=number)
        push(stack.slices(number))
    # Five tokens for each adapter, and the experts of the first ones are chosen by others too.
    x, probs, chosen = moe_networks.routed(10)
    weights = normal(*x.shape, seed=4)
    base = {p.name.split("experts.")[1]: as_array(p) for p in network.get_parameters() if not p.requires_grad}
    pairs = [
        {path.rpartition(".")[2]: list(map(as_array, cell.lora_parameters())) for path, cell in lora_cells(own)}
        for own in stack.networks
    ]
    assert [sorted(each) for each in pairs] == [["weight1", "weight2"], ["weight2"]]

    def output(number):
        """Of the tokens of an adapter."""
        mine, scale = slice(5 * number, 5 * number + 5), configs[number].lora_alpha / configs[number].lora_rank
        changed = []
        for leaf, shape in SHAPES.items():
            weight = base[leaf].reshape(shape)
            if leaf in pairs[number]:
                weight = moe_networks.changed_weight(weight, *pairs[number][leaf], scale)
            changed.append(weight)
        return moe_networks.dense_experts(x[:, mine], probs[:, mine], chosen[:, mine], *changed) * weights[:, mine]

    reference = reference_network(network)
    trained = network.trainable_params()
    loss, found = ms.value_and_grad(WeightedOutput(network), None, trained)(*map(Tensor, (x, probs, chosen, weights)))
    assert float(as_array(loss)) == pytest.approx(sum(output(number).sum() for number in (0, 1)), rel=1e-4)
    gradients = {p.name.split("experts.")[1]: as_array(gradient) for p, gradient in zip(trained, found)}
    rng = np.random.default_rng(0)
    for number, own in enumerate(pairs):
        for leaf, pair in own.items():
            for part, array in zip("ab", pair):
                rank = configs[number].lora_rank
                gradient = gradients[f"{leaf}.mindpet_delta_lora_{part}"][number]
                gradient = gradient[:, :rank] if part == "a" else gradient[:, :, :rank]
                direction, before, sums = rng.normal(size=array.shape), array.copy(), []
                for step in (1e-5, -1e-5):
                    array[...] = before + step * direction
                    sums.append(output(number).sum())
                array[...] = before
                slope = (sums[0] - sums[1]) / 2e-5
                np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-3, atol=1e-3)
    # A reference computes what the network did, however that is trained.
    for parameter in trained:
        parameter.set_data(parameter * 0)
    kept = WeightedOutput(reference)(*map(Tensor, (x, probs, chosen, weights)))
    assert float(as_array(kept)) == pytest.approx(float(as_array(loss)), rel=1e-5)


def test_an_adapter_is_saved_as_one_that_was_trained_alone(stack, tmp_path):
    model, stack = stack
    before = [as_array(parameter) for parameter in stack.networks[1].trainable_params()]
    for parameter in stack.networks[1].trainable_params():
        parameter.set_data(parameter * 0)
    pull(stack.slices(1))
    save_lora(stack.networks[1], str(tmp_path / "adapter"))
    alone = network()
    load_lora(alone, str(tmp_path / "adapter"), on_base_mismatch="error")
    for parameter, values in zip((p for _, cell in lora_cells(alone) for p in cell.lora_parameters()), before):
        np.testing.assert_array_equal(as_array(parameter), values)
    assert {cell.lora_rank for _, cell in lora_cells(alone)} == {2}


@pytest.mark.parametrize("seeds", [(None, None), (3, None), (3, 4)])
def test_initial_values_are_those_of_a_run_alone(seeds):
    ms.set_seed(1)
    model = network()
    state = np.random.get_state()
    stack = stack_adapters(model, CONFIGS, seeds)
    stack.set_initial_values()
    for number, (config, seed) in enumerate(zip(CONFIGS, seeds)):
        alone = network()
        np.random.set_state(state)
        with InitialDraws(seed):
            apply_lora(alone, config)
        freeze_base(alone)
        own = dict(lora_cells(stack.networks[number]))
        for path, cell in lora_cells(alone):
            a = stack.cells[path].mindpet_delta_lora_a.asnumpy()[number]
            np.testing.assert_array_equal(a[: config.lora_rank], cell.mindpet_delta_lora_a.asnumpy())
            assert not a[config.lora_rank :].any() and own[path].lora_rank == config.lora_rank


def test_a_cell_that_is_not_linear_is_refused(make_llama):
    model = make_llama(num_layers=1)
    config = LoraConfig(target_modules=".*tok_embeddings|.*wq")
    with pytest.raises(UnsupportedCellError, match="tok_embeddings.*LoRAEmbedding"):
        stack_adapters(model, [config, config])
