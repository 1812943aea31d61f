"""Adapters of initializations that change the base: saved as plain adapters for the original base, and loaded."""

import logging
import warnings

import numpy as np
import pytest
from mindspore import Tensor

from mindlora import apply_lora, freeze_base, initialize_adapters, load_lora, merge_and_unload, save_lora
from mindlora.core.errors import BaseMismatchError, LoraError, RankMismatchError
from mindlora.files.adapters import files as adapter_files
from mindlora.network import tree
from tests.support import networks
from tests.support.initialized_networks import INITS, adapted, base, config, outputs, train

pytestmark = pytest.mark.usefixtures("pynative_mode")

FORMS = {"peft": "adapter", "mindformers": "adapter.safetensors", "ckpt": "adapter.ckpt"}


def unchanged(network, adapter, kind, message, **arguments):
    """Asserts that loading is refused and nothing of the network has changed."""
    before = networks.snapshot(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(kind) as error:
            load_lora(network, str(adapter), **arguments)
    assert message in str(error.value)
    assert networks.snapshot(network) == before


@pytest.fixture(params=INITS)
def trained(request):
    network = adapted(request.param)
    initialize_adapters(network)
    train(network)
    return network


@pytest.mark.parametrize("form", FORMS)
def test_the_saved_adapter_is_a_plain_one_for_the_base(trained, form, tmp_path):
    save_lora(trained, str(tmp_path / FORMS[form]), form)
    network = base()
    load_lora(network, str(tmp_path / FORMS[form]), on_base_mismatch="error")
    np.testing.assert_allclose(outputs(network), outputs(trained), atol=2e-5)
    assert np.abs(outputs(network) - outputs(base())).max() > 0.01
    ranks = {cell.lora_rank for _, cell in tree.lora_cells(network)}
    scales = {cell.scale for _, cell in tree.lora_cells(network)}
    assert ranks == {6} and scales == {4 / 3}
    for path, cell in tree.lora_cells(network):
        np.testing.assert_array_equal(cell.weight.asnumpy(), dict(base().parameters_dict())[f"{path}.weight"].asnumpy())


def test_with_rslora_and_patterns(tmp_path):
    fields = {"use_rslora": True, "rank_pattern": {"wk": 2}, "alpha_pattern": {"w1": 9}}
    network = adapted(**fields)
    initialize_adapters(network)
    train(network)
    save_lora(network, str(tmp_path / "adapter"))
    plain, same, as_saved = base(), adapted(**fields), base()
    apply_lora(as_saved, config(**fields).as_saved())
    for loaded in (plain, same, as_saved):
        load_lora(loaded, str(tmp_path / "adapter"), on_base_mismatch="error")
        np.testing.assert_allclose(outputs(loaded), outputs(network), atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_network_with_the_same_lora_init_goes_on_where_it_was_saved(trained, form, tmp_path):
    """Everything bit for bit, the corrected base included; saved again, it gives the same file."""
    save_lora(trained, str(tmp_path / FORMS[form]), form)
    network = adapted(next(cell.lora_init for _, cell in tree.lora_cells(trained)))
    load_lora(network, str(tmp_path / FORMS[form]), on_base_mismatch="error")
    assert networks.snapshot(network) == networks.snapshot(trained)
    assert initialize_adapters(network) == ()
    train(network, seed=8)
    train(trained, seed=8)
    for index, model in enumerate((network, trained)):
        save_lora(model, str(tmp_path / f"again{index}"))
    first, second = (adapter_files.read(str(tmp_path / f"again{index}")) for index in range(2))
    assert (
        first.initialization == second.initialization
        and first.alphas == second.alphas
        and first.fingerprint == second.fingerprint
    )
    assert all(first.tensors[key].tobytes() == second.tensors[key].tobytes() for key in second.tensors)


def test_loaded_back_into_the_network_that_was_saved(trained, tmp_path):
    save_lora(trained, str(tmp_path / "adapter"))
    before = networks.snapshot(trained)
    train(trained, seed=9)
    assert networks.snapshot(trained) != before
    load_lora(trained, str(tmp_path / "adapter"), on_base_mismatch="error")
    assert networks.snapshot(trained) == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_of_half_precision_keep_their_bits(dtype, tmp_path):
    network, other = (adapted(param_init_type=dtype, compute_dtype="float32") for _ in range(2))
    initialize_adapters(network)
    train(network)
    save_lora(network, str(tmp_path / "adapter"))
    load_lora(other, str(tmp_path / "adapter"), on_base_mismatch="error")
    assert networks.snapshot(other) == networks.snapshot(network)


def test_other_initial_pairs_do_not_match_a_changed_base(trained, tmp_path):
    other = base(seed=4)
    apply_lora(other, config())
    freeze_base(other)
    initialize_adapters(other)
    save_lora(other, str(tmp_path / "adapter"))
    unchanged(trained, tmp_path / "adapter", BaseMismatchError, "initial pair for model.layers.0.")


def test_a_plain_adapter_does_not_match_a_changed_base(trained, tmp_path):
    plain = adapted(None)
    networks.randomize(plain.trainable_params())
    save_lora(plain, str(tmp_path / "adapter"))
    unchanged(trained, tmp_path / "adapter", BaseMismatchError, "than initialize_adapters has subtracted from the base")


@pytest.mark.parametrize("form", FORMS)
def test_mica_is_saved_as_a_plain_lora_and_goes_on_where_it_was_saved(form, tmp_path):
    trained = adapted("mica")
    initialize_adapters(trained)
    train(trained)
    save_lora(trained, str(tmp_path / FORMS[form]), form)
    again = adapted("mica")
    load_lora(again, str(tmp_path / FORMS[form]), on_base_mismatch="error")
    assert initialize_adapters(again) == () and networks.snapshot(again) == networks.snapshot(trained)
    plain = base()
    load_lora(plain, str(tmp_path / FORMS[form]), on_base_mismatch="error")
    np.testing.assert_allclose(outputs(plain), outputs(trained), atol=2e-5)
    adapter = adapter_files.read(str(tmp_path / FORMS[form]))
    assert adapter.initialization is None and {adapter.rank(path) for path in adapter.paths} == {3}


def test_mica_does_not_freeze_the_b_of_a_plain_adapter(tmp_path):
    plain = adapted(None)
    networks.randomize(plain.trainable_params())
    save_lora(plain, str(tmp_path / "adapter"))
    unchanged(adapted("mica"), tmp_path / "adapter", LoraError, "is trained, and not made of singular vectors")


def test_a_plain_adapter_replaces_an_initialization(tmp_path, caplog):
    plain, network = adapted(None), adapted()
    networks.randomize(plain.trainable_params())
    save_lora(plain, str(tmp_path / "adapter"))
    with caplog.at_level(logging.WARNING):
        load_lora(network, str(tmp_path / "adapter"), on_base_mismatch="error")
    assert "lora_init is not carried out at model.layers." in caplog.text
    assert initialize_adapters(network) == ()
    np.testing.assert_allclose(outputs(network), outputs(plain), atol=1e-6)
    save_lora(network, str(tmp_path / "again"))
    assert adapter_files.read(str(tmp_path / "again")).initialization is None


def test_a_network_of_that_rank_without_lora_init(trained, tmp_path):
    save_lora(trained, str(tmp_path / "adapter"))
    init = next(cell.lora_init for _, cell in tree.lora_cells(trained))
    unchanged(
        adapted(None),
        tmp_path / "adapter",
        RankMismatchError,
        f"was trained with lora_init '{init}' and lora_rank 3, but is saved as a plain LoRA of rank 6. Set "
        f"lora_init to '{init}', or lora_rank to 6 and lora_alpha to 8.",
    )


def test_another_base_is_noticed(trained, tmp_path):
    save_lora(trained, str(tmp_path / "adapter"))
    other = base(seed=4)
    apply_lora(other, config(next(cell.lora_init for _, cell in tree.lora_cells(trained))))
    unchanged(other, tmp_path / "adapter", BaseMismatchError, "was trained on another base", on_base_mismatch="error")


def test_metadata_with_an_unknown_initialization(trained, tmp_path):
    save_lora(trained, str(tmp_path / "adapter.safetensors"), "mindformers")
    content = (tmp_path / "adapter.safetensors").read_bytes()
    init = next(cell.lora_init for _, cell in tree.lora_cells(trained)).encode()
    (tmp_path / "adapter.safetensors").write_bytes(
        content.replace(b'\\"' + init + b'\\"', b'\\"' + b"x" * len(init) + b'\\"')
    )
    with pytest.raises(LoraError, match="start is 'x+'; it must be a lora_init that changes the base"):
        adapter_files.read(str(tmp_path / "adapter.safetensors"))


def test_merged(trained):
    expected = outputs(trained)
    merge_and_unload(trained)
    np.testing.assert_allclose(outputs(trained), expected, atol=2e-5)


@pytest.mark.parametrize("same_init", [True, False])
def test_on_joined_cells(make_llama, tmp_path, same_init):
    """It is saved for PEFT as q, k, v, which share A; joined again, it has the halves of the joined pair."""

    def build():
        network = make_llama(qkv_concat=True)
        networks.randomize([p for p in network.get_parameters() if p.name.endswith("weight")], seed=5)
        for parameter in network.get_parameters():
            parameter.set_data(Tensor(0.1 * parameter.asnumpy()))
        return network.set_train(False)

    ids = Tensor(np.arange(16, dtype=np.int32)[None] + 3)
    fields = config(target_modules=["w_qkv", "w_gate_hidden"])
    network = build()
    apply_lora(network, fields)
    freeze_base(network)
    initialize_adapters(network)
    train(network)
    save_lora(network, str(tmp_path / "adapter"))
    other = build()
    if same_init:
        apply_lora(other, fields)
    load_lora(other, str(tmp_path / "adapter"))
    np.testing.assert_allclose(other(ids)[0].asnumpy(), network(ids)[0].asnumpy(), atol=2e-5)
    if same_init:
        assert networks.snapshot(other) == networks.snapshot(network)


def test_pairs_joined_side_by_side_have_no_halves(tmp_path):
    from mindlora.files.adapters import joined_pairs

    network = adapted(target_modules=["w1", "w3"])
    initialize_adapters(network)
    save_lora(network, str(tmp_path / "adapter"))
    adapter = adapter_files.read(str(tmp_path / "adapter"))
    assert adapter.initialization == "pissa"
    for layer in range(2):
        joined_pairs.join_pairs(adapter, f"model.layers.{layer}.feed_forward.w_gate_hidden", 18)
    assert adapter.initialization is None
