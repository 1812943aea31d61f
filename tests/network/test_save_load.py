"""save_lora and load_lora: what is saved can be loaded, by mindlora and MindSpore; adapters of MindFormers load too."""

import logging
import os
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, LoRADense, LoraError, apply_lora, load_lora, merge_lora, save_lora, unmerge_lora
from mindlora.core.errors import UnexpectedTensorsError
from tests.support.networks import HuggingFaceLayer, TinyModel, adapters, as_array, snapshot
from tests.support.saved_adapters import FORMS, load_refused, network

# The round trip -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("param_init_type", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form, name", FORMS)
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, form, name, param_init_type):
    source = network("all-linear", seed=2, param_init_type=param_init_type)
    target = network("all-linear", seed=3, param_init_type=param_init_type)
    path = tmp_path / "deeper" / name  # paths of any type work
    save_lora(source, path, format=form)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(target, path)
    assert snapshot(target) == snapshot(source)
    assert all(p.dtype == getattr(ms, param_init_type) for p in adapters(target).values())


@pytest.mark.parametrize("form, name", FORMS)
def test_saving_changes_nothing_in_the_network(tmp_path, form, name):
    source = network()
    before = snapshot(source)
    save_lora(source, str(tmp_path / name), format=form)
    assert snapshot(source) == before


@pytest.mark.parametrize(
    "written, read", [("float32", "float16"), ("float16", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("form, name", FORMS)
def test_another_dtype_is_cast_to_the_network_s_own(tmp_path, form, name, written, read):
    source, target = network(seed=2, param_init_type=written), network(seed=3, param_init_type=read)
    save_lora(source, str(tmp_path / name), format=form)
    load_lora(target, str(tmp_path / name))
    for parameter, original in zip(adapters(target).values(), adapters(source).values()):
        assert parameter.dtype == getattr(ms, read)
        np.testing.assert_array_equal(as_array(parameter), as_array(original.astype(getattr(ms, read))))


@pytest.mark.filterwarnings("ignore:lora_alpha is")
@pytest.mark.parametrize("alpha", [1, 2.3, 1 / 3, 1e6])
@pytest.mark.parametrize("form, name", FORMS)
def test_every_scale_makes_the_round_trip(tmp_path, form, name, alpha):
    save_lora(network(lora_alpha=alpha, seed=2), str(tmp_path / name), format=form)
    load_lora(network(lora_alpha=alpha), str(tmp_path / name))


@pytest.mark.parametrize("form, name", FORMS)
def test_an_adapter_replaces_another(tmp_path, form, name):
    path = str(tmp_path / name)
    save_lora(network("all-linear", seed=2), path, format=form)
    save_lora(network(seed=4), path, format=form)
    target = network()
    load_lora(target, path)
    assert snapshot(target) == snapshot(network(seed=4)) and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("form, name", FORMS)
def test_a_network_under_hugging_face_names(tmp_path, form, name):
    source, target = (network("all-linear", seed=seed, cell=HuggingFaceLayer) for seed in (2, 3))
    save_lora(source, str(tmp_path / name), format=form)
    load_lora(target, str(tmp_path / name))
    assert snapshot(target) == snapshot(source)


@pytest.mark.parametrize("form, name", FORMS)
def test_a_bare_cell(tmp_path, form, name):
    source, target = LoRADense(6, 5, 2, 3, lora_b_init="ones"), LoRADense(6, 5, 2, 3)
    save_lora(source, str(tmp_path / name), format=form)
    load_lora(target, str(tmp_path / name), on_base_mismatch="ignore")
    for mine, original in zip(target.lora_parameters(), source.lora_parameters()):
        np.testing.assert_array_equal(mine.asnumpy(), original.asnumpy())


def test_a_network_whose_weights_have_no_values_yet(tmp_path, saved, semi_auto_parallel, caplog):
    target = TinyModel()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "wk"]))
    assert all(p.has_init for p in adapters(target).values())
    with caplog.at_level(logging.WARNING, "mindlora"):
        load_lora(target, saved)
    assert [record.getMessage() for record in caplog.records] == [
        f"{saved}: the base has no values yet, so it was not checked whether the adapter was trained on it. Load the "
        "base first, or compare the two yourself."
    ]
    target.init_parameters_data()
    loaded = adapters(target)
    for name, parameter in adapters(network(seed=2)).items():
        np.testing.assert_array_equal(loaded[name].asnumpy(), parameter.asnumpy())


# MindFormers' own LoRA ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_a_checkpoint_of_a_training_run_gives_its_adapter(tmp_path, form):
    source = network(seed=2)
    content = [{"name": p.name, "data": Tensor(p.asnumpy())} for p in source.get_parameters()]
    content += [
        {"name": prefix + name, "data": Tensor(np.full(p.shape, 7, np.float32))}
        for prefix in ("adam_m.", "adam_v.")
        for name, p in adapters(source).items()
    ]
    path = str(tmp_path / f"llama_rank_0-4_2.{form}")
    facts = {"epoch_num": 4, "step_num": 8, "loss_scale": 1.0} if form == "ckpt" else None
    ms.save_checkpoint(content, path, append_dict=facts, format=form)
    target = network(base=6)
    base = {name: value for name, value in snapshot(target).items() if name not in adapters(target)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(target, path)
    after = snapshot(target)
    assert {name: after[name] for name in base} == base
    for name in adapters(source):
        assert after[name] == snapshot(source)[name]


@pytest.mark.parametrize("extra, error", [(["wv"], UnexpectedTensorsError), ([], None)])
def test_such_a_checkpoint_is_loaded_strictly_too(tmp_path, extra, error):
    source = network(["wq", "wk"] + extra)
    path = str(tmp_path / "run.ckpt")
    ms.save_checkpoint(source, path)
    if error:
        load_refused(network(), path, error, "PATH holds 4 LoRA tensors that the network has no place for: ")
    else:
        load_lora(network(seed=3), path)


def test_capital_letters_of_a_bare_cell(tmp_path):
    path = str(tmp_path / "cell.ckpt")
    a, b = np.arange(12, dtype=np.float32).reshape(2, 6), np.arange(10, dtype=np.float32).reshape(5, 2)
    ms.save_checkpoint(
        [{"name": "mindpet_delta_lora_A", "data": Tensor(a)}, {"name": "mindpet_delta_lora_B", "data": Tensor(b)}], path
    )
    target = LoRADense(6, 5, 2, 3)
    load_lora(target, path)
    np.testing.assert_array_equal(target.mindpet_delta_lora_a.asnumpy(), a)
    np.testing.assert_array_equal(target.mindpet_delta_lora_b.asnumpy(), b)


# Merged ---------------------------------------------------------------------------------------------------------


def test_a_merged_adapter_is_neither_saved_nor_replaced(tmp_path, saved):
    target = network()
    target.set_train(False)
    merge_lora(target)
    load_refused(
        target,
        saved,
        LoraError,
        "The adapter is merged into the base, at model.layers.{0..1}.attention.wq, "
        "model.layers.{0..1}.attention.wk. Call unmerge_lora first.",
    )
    with pytest.raises(LoraError, match="Call unmerge_lora first."):
        save_lora(target, str(tmp_path / "other"))
    assert os.listdir(tmp_path) == ["adapter"]
    unmerge_lora(target)
    load_lora(target, saved)
    assert snapshot(target) == snapshot(network(seed=2))
