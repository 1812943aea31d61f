"""Starts that change the base, in networks: what they leave of the forward, and adapters saved and loaded."""
import logging
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters

from mindlora import (LoraConfig, LoRADense, adapt, adapter_file, apply_lora, freeze_base, load_lora, merge_and_unload,
                      save_lora, start_adapters, starts)
from mindlora.errors import BaseMismatchError, LoraError, RankMismatchError, UnsupportedCellError
from tests import helpers

INITS = ["pissa", "pissa_niter_3", "olora"]
X = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)


def base(seed=3):
    """Returns the same plain network each time, with outputs of about 1."""
    network = helpers.TinyModel()
    rng = np.random.default_rng(seed)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(0.3 * rng.normal(size=parameter.shape).astype(np.float32)))
    return network.set_train(False)


def config(init="pissa", **fields):
    return LoraConfig(**{"lora_rank": 3, "lora_alpha": 4, "target_modules": ["wq", "wk", "w1", "w2"], "lora_init": init,
                         **fields})


def adapted(init="pissa", **fields):
    network = base()
    apply_lora(network, config(init, **fields))
    freeze_base(network)
    return network


def train(network, seed=7):
    """Moves all that trains, as training would."""
    rng = np.random.default_rng(seed)
    for parameter in network.trainable_params():
        moved = helpers.as_array(parameter) + 0.1 * rng.normal(size=parameter.shape)
        parameter.set_data(Tensor(moved.astype(np.float32), parameter.dtype))


def outputs(network):
    network.set_train(False)
    return network(Tensor(X)).asnumpy()


@pytest.fixture(autouse=True)
def _pynative():
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=before)


# Starting

@pytest.mark.parametrize("rslora", [False, True], ids=["alpha/r", "rslora"])
@pytest.mark.parametrize("init", INITS)
def test_a_start_fills_a_and_b_and_leaves_the_forward(init, rslora):
    plain, network = base(), adapted(init, use_rslora=rslora)
    weights = {path: cell.weight.asnumpy().copy() for path, cell in adapt.lora_cells(network)}
    assert start_adapters(network) == tuple(weights)
    np.testing.assert_allclose(outputs(network), outputs(plain), atol=2e-5)
    for path, cell in adapt.lora_cells(network):
        expected = starts.of_base(init, weights[path], 3, cell.scale)
        for parameter, array in zip(cell.lora_parameters(), expected):
            np.testing.assert_array_equal(parameter.asnumpy(), array)
        np.testing.assert_allclose(cell.weight.asnumpy(),
                                   weights[path] - cell.scale * expected[1] @ expected[0], atol=1e-5)
        assert np.abs(cell.weight.asnumpy() - weights[path]).max() > 0.1


def test_in_both_modes(mode):
    network = adapted()
    expected = outputs(network)
    start_adapters(network)
    np.testing.assert_allclose(outputs(network), expected, atol=2e-5)


def test_a_graph_that_was_compiled_before_runs_on():
    ms.set_context(mode=ms.GRAPH_MODE)
    network = adapted()
    expected = outputs(network)
    start_adapters(network)
    np.testing.assert_allclose(outputs(network), expected, atol=2e-5)
    train(network)
    assert np.abs(outputs(network) - expected).max() > 0.01


def test_a_second_call_does_nothing():
    network = adapted()
    start_adapters(network)
    train(network)
    before = helpers.snapshot(network)
    assert start_adapters(network) == ()
    assert helpers.snapshot(network) == before


@pytest.mark.parametrize("init", [None, "kaiming", "gaussian", "orthogonal"])
def test_a_start_without_the_base_needs_no_call(init):
    network = adapted(init, lora_rank=2)
    before = helpers.snapshot(network)
    assert start_adapters(network) == ()
    assert helpers.snapshot(network) == before


def test_until_it_is_started_the_network_is_the_base():
    np.testing.assert_array_equal(outputs(adapted()), outputs(base()))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_and_b_in_half_precision(dtype):
    """The base makes up for A and B as they were rounded."""
    network, plain = adapted(param_init_type=dtype, compute_dtype="float32"), base()
    start_adapters(network)
    np.testing.assert_allclose(outputs(network), outputs(plain), atol=2e-5)


@pytest.mark.parametrize("dtype, error", [(ms.float16, 2e-3), (ms.bfloat16, 2e-2)])
def test_a_base_in_half_precision(dtype, error):
    cell = nn.Dense(16, 12, has_bias=False, dtype=dtype)
    weight = helpers.as_array(cell.weight)
    cell = LoRADense.from_dense(cell, config(lora_rank=4))
    start_adapters(cell)
    a, b = map(helpers.as_array, cell.lora_parameters())
    assert cell.weight.dtype == dtype
    np.testing.assert_allclose(helpers.as_array(cell.weight) + cell.scale * b @ a, weight, atol=error)


def test_patterns_give_each_cell_its_rank():
    network = adapted(rank_pattern={"wk": 2}, alpha_pattern={"w1": 9})
    expected = outputs(network)
    start_adapters(network)
    np.testing.assert_allclose(outputs(network), expected, atol=2e-5)
    assert {cell.lora_rank for _, cell in adapt.lora_cells(network)} == {2, 3}


def test_dora_starts_from_the_norms_of_the_base():
    network, plain = adapted(use_dora=True), base()
    network.set_train(True)
    start_adapters(network)
    np.testing.assert_allclose(outputs(network), outputs(plain), atol=2e-5)
    train(network)
    network.set_train(True)
    for _, cell in adapt.lora_cells(network):
        cell.prepare()


# What is refused

def refused(network, message, kind=LoraError):
    before = helpers.snapshot(network)
    with pytest.raises(kind) as error:
        start_adapters(network)
    assert message in str(error.value)
    assert helpers.snapshot(network) == before


def test_a_network_without_adapters():
    refused(base(), "The network holds no LoRADense cell, so there is nothing to start.")


def test_a_trained_adapter_is_not_started_over():
    network = adapted()
    cell = network.model.layers[1].attention.wk
    cell.mindpet_delta_lora_b.set_data(Tensor(np.ones((4, 3), np.float32)))
    refused(network, "B is not zero at model.layers.1.attention.wk, where lora_init 'pissa' is to start: the "
                     "checkpoint of the base holds a trained adapter.")


def test_a_weight_that_another_cell_has_too():
    network = base()
    network.model.layers[0].attention.wo.weight = network.model.layers[0].attention.wq.weight
    apply_lora(network, config(target_modules=["wq"]))
    refused(network, "model.layers.0.attention.wq shares its weight with model.layers.0.attention.wo (")


def test_a_weight_with_nan():
    network = adapted()
    network.model.layers[0].attention.wq.weight.set_data(Tensor(np.full((6, 6), np.nan, np.float32)))
    refused(network, "The weight of model.layers.0.attention.wq holds NaN or infinity, so that lora_init 'pissa'")


def test_weights_without_values():
    with no_init_parameters():
        network = helpers.TinyModel(1)
        apply_lora(network, config())
    with pytest.raises(LoraError, match="^lora_init 'pissa' is made from the base's weights, which have no values yet "
                                        "at model.layers.0.attention.wq"):
        start_adapters(network)


def test_a_part_of_a_weight():
    cell = LoRADense.from_dense(nn.Dense(6, 6, has_bias=False), config())
    cell.weight = ms.Parameter(Tensor(np.ones((3, 6), np.float32)), name="weight")
    with pytest.raises(LoraError, match=r"^The weight of the cell is a part of a sharded one, \[3, 6\], and lora_init"):
        start_adapters(cell)


def test_weights_of_a_dtype_that_is_no_float():
    cell = LoRADense.from_dense(nn.Dense(6, 6, has_bias=False), config())
    cell.weight.set_dtype(ms.int8)
    with pytest.raises(LoraError, match="^The weight of the cell is Int8: lora_init 'pissa' is made from float32"):
        start_adapters(cell)


def test_a_sharded_cell(semi_auto_parallel):
    cell = nn.Dense(8, 8, has_bias=False)
    cell.matmul.shard(((2, 1), (2, 1)))
    with pytest.raises(UnsupportedCellError, match="^Dense is sharded, and lora_init 'orthogonal' needs whole weights"):
        LoRADense.from_dense(cell, config("orthogonal", lora_rank=2))
    assert LoRADense.from_dense(cell, config("gaussian")).lora_init == "gaussian"


def test_saving_before_the_start(tmp_path):
    with pytest.raises(LoraError, match="^lora_init 'pissa' has not been carried out at model.layers.0-1"
                                        r"|^lora_init 'pissa' has not been carried out at "):
        save_lora(adapted(), str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter").exists()


# Saved and loaded

FORMS = {"peft": "adapter", "mindformers": "adapter.safetensors", "ckpt": "adapter.ckpt"}


@pytest.fixture(params=INITS)
def trained(request):
    network = adapted(request.param)
    start_adapters(network)
    train(network)
    return network


@pytest.mark.parametrize("form", FORMS)
def test_the_saved_adapter_is_a_plain_one_for_the_base(trained, form, tmp_path):
    save_lora(trained, str(tmp_path / FORMS[form]), form)
    network = base()
    load_lora(network, str(tmp_path / FORMS[form]), on_base_mismatch="error")
    np.testing.assert_allclose(outputs(network), outputs(trained), atol=2e-5)
    assert np.abs(outputs(network) - outputs(base())).max() > 0.01
    ranks = {cell.lora_rank for _, cell in adapt.lora_cells(network)}
    scales = {cell.scale for _, cell in adapt.lora_cells(network)}
    assert ranks == {6} and scales == {4 / 3}
    for path, cell in adapt.lora_cells(network):
        np.testing.assert_array_equal(cell.weight.asnumpy(), dict(base().parameters_dict())[f"{path}.weight"].asnumpy())


def test_with_rslora_and_patterns(tmp_path):
    fields = {"use_rslora": True, "rank_pattern": {"wk": 2}, "alpha_pattern": {"w1": 9}}
    network = adapted(**fields)
    start_adapters(network)
    train(network)
    save_lora(network, str(tmp_path / "adapter"))
    plain, same, as_saved = base(), adapted(**fields), base()
    apply_lora(as_saved, config(**fields).as_saved())
    for loaded in (plain, same, as_saved):
        load_lora(loaded, str(tmp_path / "adapter"), on_base_mismatch="error")
        np.testing.assert_allclose(outputs(loaded), outputs(network), atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_network_of_the_same_start_goes_on_where_it_was_saved(trained, form, tmp_path):
    """All of it bit for bit, the corrected base included; and saved again, the same file."""
    save_lora(trained, str(tmp_path / FORMS[form]), form)
    network = adapted(next(cell.lora_init for _, cell in adapt.lora_cells(trained)))
    load_lora(network, str(tmp_path / FORMS[form]), on_base_mismatch="error")
    assert helpers.snapshot(network) == helpers.snapshot(trained)
    assert start_adapters(network) == ()
    train(network, seed=8)
    train(trained, seed=8)
    for index, model in enumerate((network, trained)):
        save_lora(model, str(tmp_path / f"again{index}"))
    first, second = (adapter_file.read(str(tmp_path / f"again{index}")) for index in range(2))
    assert first.start == second.start and first.alphas == second.alphas and first.fingerprint == second.fingerprint
    assert all(first.tensors[place].tobytes() == second.tensors[place].tobytes() for place in second.tensors)


def test_loaded_back_into_the_network_that_was_saved(trained, tmp_path):
    save_lora(trained, str(tmp_path / "adapter"))
    before = helpers.snapshot(trained)
    train(trained, seed=9)
    assert helpers.snapshot(trained) != before
    load_lora(trained, str(tmp_path / "adapter"), on_base_mismatch="error")
    assert helpers.snapshot(trained) == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_of_half_precision_keep_their_bits(dtype, tmp_path):
    network, other = (adapted(param_init_type=dtype, compute_dtype="float32") for _ in range(2))
    start_adapters(network)
    train(network)
    save_lora(network, str(tmp_path / "adapter"))
    load_lora(other, str(tmp_path / "adapter"), on_base_mismatch="error")
    assert helpers.snapshot(other) == helpers.snapshot(network)


def test_another_start_does_not_fit_a_corrected_base(trained, tmp_path):
    other = base(seed=4)
    apply_lora(other, config())
    freeze_base(other)
    start_adapters(other)
    save_lora(other, str(tmp_path / "adapter"))
    unchanged(trained, tmp_path / "adapter", BaseMismatchError, "holds for model.layers.0.")


def test_a_plain_adapter_does_not_fit_a_corrected_base(trained, tmp_path):
    plain = adapted(None)
    helpers.randomize(plain.trainable_params())
    save_lora(plain, str(tmp_path / "adapter"))
    unchanged(trained, tmp_path / "adapter", BaseMismatchError, "another start than the one that start_adapters has")


def test_a_plain_adapter_takes_the_place_of_a_start(tmp_path, caplog):
    plain, network = adapted(None), adapted()
    helpers.randomize(plain.trainable_params())
    save_lora(plain, str(tmp_path / "adapter"))
    with caplog.at_level(logging.WARNING):
        load_lora(network, str(tmp_path / "adapter"), on_base_mismatch="error")
    assert "lora_init is not carried out at model.layers." in caplog.text
    assert start_adapters(network) == ()
    np.testing.assert_allclose(outputs(network), outputs(plain), atol=1e-6)
    save_lora(network, str(tmp_path / "again"))
    assert adapter_file.read(str(tmp_path / "again")).start is None


def test_a_network_of_that_rank_without_the_start(trained, tmp_path):
    save_lora(trained, str(tmp_path / "adapter"))
    init = next(cell.lora_init for _, cell in adapt.lora_cells(trained))
    unchanged(adapted(None), tmp_path / "adapter", RankMismatchError,
              f"was trained with lora_init '{init}' and lora_rank 3, and is saved as a plain LoRA of rank 6. Set "
              f"lora_init to '{init}', or lora_rank to 6 and lora_alpha to 8.")


def test_another_base_is_noticed(trained, tmp_path):
    save_lora(trained, str(tmp_path / "adapter"))
    other = base(seed=4)
    apply_lora(other, config(next(cell.lora_init for _, cell in adapt.lora_cells(trained))))
    unchanged(other, tmp_path / "adapter", BaseMismatchError, "was trained on another base",
              on_base_mismatch="error")


def test_a_record_of_a_start_that_is_none(trained, tmp_path):
    save_lora(trained, str(tmp_path / "adapter.safetensors"), "mindformers")
    content = (tmp_path / "adapter.safetensors").read_bytes()
    init = next(cell.lora_init for _, cell in adapt.lora_cells(trained)).encode()
    (tmp_path / "adapter.safetensors").write_bytes(content.replace(b'\\"' + init + b'\\"', b'\\"' + b"x" * len(init)
                                                                   + b'\\"'))
    with pytest.raises(LoraError, match="start is 'x+', it must be a lora_init that changes the base"):
        adapter_file.read(str(tmp_path / "adapter.safetensors"))


def test_merged(trained):
    expected = outputs(trained)
    merge_and_unload(trained)
    np.testing.assert_allclose(outputs(trained), expected, atol=2e-5)


@pytest.mark.parametrize("same_start", [True, False])
def test_on_concatenated_cells(make_llama, tmp_path, same_start):
    """Saved for PEFT as q, k, v, which share A; joined again, its halves are those of the whole."""
    def build():
        network = make_llama(qkv_concat=True)
        helpers.randomize([p for p in network.get_parameters() if p.name.endswith("weight")], seed=5)
        for parameter in network.get_parameters():
            parameter.set_data(Tensor(0.1 * parameter.asnumpy()))
        return network.set_train(False)
    ids = Tensor(np.arange(16, dtype=np.int32)[None] + 3)
    fields = config(target_modules=["w_qkv", "w_gate_hidden"])
    network = build()
    apply_lora(network, fields)
    freeze_base(network)
    start_adapters(network)
    train(network)
    save_lora(network, str(tmp_path / "adapter"))
    other = build()
    if same_start:
        apply_lora(other, fields)
    load_lora(other, str(tmp_path / "adapter"))
    np.testing.assert_allclose(other(ids)[0].asnumpy(), network(ids)[0].asnumpy(), atol=2e-5)
    if same_start:
        assert helpers.snapshot(other) == helpers.snapshot(network)


def test_pairs_that_are_joined_side_by_side_have_no_halves(tmp_path):
    from mindlora.dialects import concatenated
    network = adapted(target_modules=["w1", "w3"])
    start_adapters(network)
    save_lora(network, str(tmp_path / "adapter"))
    adapter = adapter_file.read(str(tmp_path / "adapter"))
    assert adapter.start == "pissa"
    for layer in range(2):
        concatenated.join_pairs(adapter, f"model.layers.{layer}.feed_forward.w_gate_hidden", 18)
    assert adapter.start is None


def unchanged(network, adapter, kind, message, **arguments):
    """Asserts that loading is refused and nothing of the network has changed."""
    before = helpers.snapshot(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kind) as error:
            load_lora(network, str(adapter), **arguments)
    assert message in str(error.value)
    assert helpers.snapshot(network) == before
