"""load_lora on a network without adapters: it adds them, and saved modules too."""

import json
import logging
import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file, save_file

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.core.errors import (
    BaseMismatchError,
    MissingTensorsError,
    NotFiniteError,
    RankMismatchError,
    ScaleMismatchError,
    ShapeMismatchError,
    UnexpectedTensorsError,
    UnsupportedCellError,
)
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from tests.support.networks import HuggingFaceLayer, TinyModel, randomize
from tests.support.plain_networks import (
    CONFIG,
    SIZES,
    folder,
    inputs,
    lora_on,
    make_adapter,
    merged,
    pair,
    plain,
    plain_load_refused,
)

# What is loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"use_rslora": True},
        {"ranks": (1, 3, 2)},
        {"alphas": (3.0, 1.5, 8.0)},
        {"layers": (1,)},
        {"ranks": (3, 1), "alphas": (2.5,), "use_rslora": True},
        {"leaves": tuple(SIZES)},
    ],
    ids=str,
)
def test_a_plain_network_gets_the_adapter_with_its_ranks_and_scales(tmp_path, fields):
    adapter = make_adapter(**fields)
    target = plain()
    before = target(inputs()).asnumpy()
    load_lora(target, folder(tmp_path, adapter))
    assert lora_on(target) == sorted(adapter.paths, key=[name for name, _ in target.cells_and_names()].index)
    outputs = target(inputs()).asnumpy()
    expected = merged(plain(), adapter)
    np.testing.assert_allclose(outputs, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
    assert np.abs(outputs - before).max() > 0.1


@pytest.mark.parametrize(
    "to, name", [("peft", "adapter"), ("mindformers", "a.safetensors"), ("ckpt", "a.ckpt"), ("slora", "adapter")]
)
def test_every_form_is_loaded_and_saved_again_bit_for_bit(tmp_path, to, name):
    adapter = make_adapter(ranks=(2, 2, 1) if to != "slora" else (2,), alphas=(4.0,))
    adapter_files.write(adapter, str(tmp_path / name), to)
    target = plain()
    load_lora(target, str(tmp_path / name))
    save_lora(target, str(tmp_path / "again"))
    again = adapter_files.read(str(tmp_path / "again"))
    assert again.alphas == adapter.alphas and set(again.tensors) == set(adapter.tensors)
    for key, array in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[key], array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_tensors_keep_their_dtype(tmp_path, dtype):
    source = plain()
    apply_lora(source, LoraConfig(lora_rank=2, target_modules=["wq"], param_init_type=dtype, lora_b_init="ones"))
    save_lora(source, str(tmp_path / "adapter"))
    target = plain()
    load_lora(target, str(tmp_path / "adapter"))
    loaded = target.model.layers[0].attention.wq
    assert {str(p.dtype).lower() for p in loaded.lora_parameters()} == {dtype}
    save_lora(target, str(tmp_path / "again"))
    first, second = ((tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("adapter", "again"))
    assert first == second


def test_dropout_is_kept_for_whoever_trains_on(tmp_path):
    target = plain()
    load_lora(target, folder(tmp_path, make_adapter(dropout=0.25)))
    assert target.model.layers[0].attention.wq.dropout_rate == 0.25
    save_lora(target, str(tmp_path / "again"))
    assert adapter_files.read(str(tmp_path / "again")).dropout == 0.25


def test_a_network_under_hugging_face_names(tmp_path):
    source = plain(HuggingFaceLayer)
    apply_lora(source, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["q_proj"], lora_b_init="normal"))
    save_lora(source, str(tmp_path / "adapter"))
    target = plain(HuggingFaceLayer)
    load_lora(target, str(tmp_path / "adapter"))
    assert lora_on(target) == ["self_attn.q_proj"]
    np.testing.assert_array_equal(target(inputs()).asnumpy(), source(inputs()).asnumpy())


def test_a_graph_that_was_compiled_before_is_compiled_anew(tmp_path, mode):
    adapter, target = make_adapter(layers=(0,)), plain(lambda: TinyModel(1))
    before = target(inputs()).asnumpy()
    load_lora(target, folder(tmp_path, adapter))
    assert np.abs(target(inputs()).asnumpy() - before).max() > 0.1


def test_it_can_be_trained_on(tmp_path):
    target = plain()
    load_lora(target, folder(tmp_path, make_adapter()))
    freeze_base(target)
    assert {p.name.rpartition(".")[2] for p in target.trainable_params()} == {
        "mindpet_delta_lora_a",
        "mindpet_delta_lora_b",
    }


@pytest.mark.parametrize(
    "target_modules, config",
    [
        (["q_proj", "down_proj"], {}),
        (r".*\.(q|down)_proj", {}),
        ("model.layers.[01].(self_attn.q|mlp.down)_proj", {}),
        (["q_proj", "down_proj", "not_there"], {}),
        (["q_proj", "down_proj", "lm_head"], {"exclude_modules": ["lm_head"]}),
    ],
)
def test_target_modules_in_each_form_peft_writes(tmp_path, target_modules, config):
    path = folder(tmp_path, make_adapter(), target_modules=target_modules, **config)
    target = plain()
    load_lora(target, path)
    assert len(lora_on(target)) == 4


def test_all_linear_and_layers_to_transform(tmp_path):
    target = plain()
    load_lora(target, folder(tmp_path, make_adapter(tuple(SIZES)), target_modules="all-linear"))
    assert len(lora_on(target)) == 14
    target = plain()
    load_lora(
        target,
        folder(tmp_path, make_adapter(layers=(1,)), target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
    )
    assert len(lora_on(target)) == 2


# What is refused ------------------------------------------------------------------------------------------------


def test_a_pair_that_the_configuration_names_and_the_file_lacks(tmp_path):
    path = folder(tmp_path, make_adapter(), target_modules=["q_proj", "v_proj", "down_proj"])
    plain_load_refused(
        path,
        MissingTensorsError,
        "PATH lacks 4 LoRA tensors of the network: model.layers.{0..1}.attention.wv A, "
        "model.layers.{0..1}.attention.wv B. Check target_modules.",
    )
    path = folder(tmp_path, make_adapter(layers=(1,)), target_modules=["q_proj", "down_proj"])
    plain_load_refused(
        path, MissingTensorsError, "PATH lacks 4 LoRA tensors of the network: model.layers.0.attention.wq A"
    )


def test_a_pair_that_the_network_has_no_place_for(tmp_path, caplog):
    path = folder(tmp_path, make_adapter(layers=(0, 1, 2)))
    plain_load_refused(
        path,
        UnexpectedTensorsError,
        "PATH holds 4 LoRA tensors that the network has no place for: "
        "model.layers.2.feed_forward.w2 A, model.layers.2.feed_forward.w2 B, model.layers.2.attention.wq A, "
        "model.layers.2.attention.wq B.",
    )
    target = plain()
    with caplog.at_level(logging.WARNING, "mindlora"):
        load_lora(target, path, strict=False)
    assert len(lora_on(target)) == 4 and "Loading the rest, as strict is False." in caplog.text


def test_shapes_numbers_and_bases_are_checked_before_anything_changes(tmp_path):
    adapter = make_adapter()
    adapter.tensors["model.layers.1.attention.wq", "A"] = np.ones((2, 7), np.float32)
    plain_load_refused(
        folder(tmp_path, adapter),
        ShapeMismatchError,
        "model.layers.1.attention.wq A is [2, 7], the network's is [2, 6]",
    )
    path = folder(tmp_path, make_adapter())
    tensors = load_file(os.path.join(path, "adapter_model.safetensors"))
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"][-1, -1] = np.inf
    save_file(tensors, os.path.join(path, "adapter_model.safetensors"))
    plain_load_refused(
        path, NotFiniteError, "PATH holds tensors with NaN or infinity: model.layers.0.feed_forward.w2 B."
    )
    source = plain(seed=6)
    apply_lora(source, LoraConfig(lora_rank=2, target_modules=["wq"]))
    save_lora(source, str(tmp_path / "adapter"))
    plain_load_refused(path, BaseMismatchError, "PATH was trained on another base", on_base_mismatch="error")


def test_an_adapter_that_does_not_say_its_alpha_needs_a_network_that_does(tmp_path):
    adapter = make_adapter()
    path = str(tmp_path / "llama_lora.ckpt")
    ms.save_checkpoint(
        [
            {"name": f"{path}.mindpet_delta_lora_{part.lower()}", "data": Tensor(array)}
            for (path, part), array in adapter.tensors.items()
        ],
        path,
    )
    plain_load_refused(path, ScaleMismatchError, "does not state lora_alpha")
    target = plain()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "w2"]))
    load_lora(target, path)
    np.testing.assert_allclose(target(inputs()).asnumpy(), merged(plain(), adapter), rtol=1e-4, atol=1e-4)


def test_an_adapter_on_a_cell_that_cannot_carry_lora(tmp_path):
    class Other(nn.Dense):
        def construct(self, x):
            return super().construct(x) + 1

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.wq = Other(6, 6)

    a, b = pair(np.random.default_rng(0), "wq", 2)
    path = folder(tmp_path, Adapter({("wq", "A"): a, ("wq", "B"): b}, {"wq": 2.0}))
    plain_load_refused(path, UnsupportedCellError, "wq: Other has a forward of its own", Net)


def test_a_network_that_was_built_with_other_ranks_for_some_cells(tmp_path):
    path = folder(tmp_path, make_adapter(("wq", "wk"), ranks=(2, 3), alphas=(3.0, 5.0)))
    target = plain()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "wk"]))
    with pytest.raises(RankMismatchError) as error:
        load_lora(target, path)
    assert str(error.value) == (
        f"{path} has rank 3, but the network was built with lora_rank 2: set lora_rank to 3 "
        "(rank_pattern) for model.layers.{0..1}.attention.wk."
    )
    target = plain()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "wk"], rank_pattern={"wk": 3}))
    with pytest.raises(ScaleMismatchError) as error:
        load_lora(target, path)
    assert str(error.value) == (
        f"{path} was trained with lora_alpha 5, but the network was built with 3: set lora_alpha to 5 (alpha_pattern) "
        "for model.layers.{0..1}.attention.wk, or its effect is scaled wrongly."
    )
    target = plain()
    apply_lora(
        target,
        LoraConfig(
            lora_rank=2,
            lora_alpha=3,
            target_modules=["wq", "wk"],
            rank_pattern={"k_proj": 3},
            alpha_pattern={r".*\.wk": 5},
        ),
    )
    load_lora(target, path)


def test_a_network_that_scales_by_the_root_where_the_adapter_does_not(tmp_path):
    target = plain()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "w2"], use_rslora=True))
    path = folder(tmp_path, make_adapter())
    with pytest.raises(ScaleMismatchError) as error:
        load_lora(target, path)
    assert str(error.value) == (
        f"{path} was trained with use_rslora False, but the network was built with True: set "
        "use_rslora to False, or its effect is scaled wrongly."
    )


# Saved modules --------------------------------------------------------------------------------


def test_saved_modules_are_loaded_marked_and_saved_again(tmp_path):
    rng = np.random.default_rng(2)
    modules = {"lm_head.weight": rng.normal(size=(8, 6)).astype(np.float32)}
    path = folder(tmp_path, make_adapter(saved_modules=modules))
    assert adapter_files.read(path).saved_modules.keys() == {"lm_head.weight"}
    target = plain()
    load_lora(target, path)
    np.testing.assert_array_equal(target.lm_head.weight.asnumpy(), modules["lm_head.weight"])
    freeze_base(target)
    assert target.lm_head.weight.requires_grad and not target.model.layers[0].attention.wo.weight.requires_grad
    save_lora(target, str(tmp_path / "again"))
    again = adapter_files.read(str(tmp_path / "again"))
    np.testing.assert_array_equal(again.saved_modules["lm_head.weight"], modules["lm_head.weight"])
    with open(tmp_path / "again" / CONFIG, encoding="utf-8") as file:
        assert json.load(file)["modules_to_save"] == ["lm_head"]


def test_modules_to_save_of_a_configuration_are_trained_and_saved(tmp_path):
    source = plain()
    report = apply_lora(
        source,
        LoraConfig(
            lora_rank=2,
            target_modules=["wq"],
            modules_to_save=["lm_head", "model.layers.1.attention_norm"],
            lora_b_init="ones",
        ),
    )
    freeze_base(source)
    assert {p.name for p in source.trainable_params() if "lora" not in p.name} == {
        "lm_head.weight",
        "model.layers.1.attention_norm.gamma",
        "model.layers.1.attention_norm.beta",
    }
    assert report.trainable == sum(p.size for p in source.trainable_params())
    randomize([source.lm_head.weight], 7)
    save_lora(source, str(tmp_path / "adapter.ckpt"), "ckpt")
    target = plain()
    load_lora(target, str(tmp_path / "adapter.ckpt"))
    np.testing.assert_array_equal(target(inputs()).asnumpy(), source(inputs()).asnumpy())


def test_a_saved_module_needs_no_pair(tmp_path):
    modules = {"lm_head.weight": np.ones((8, 6), np.float32)}
    target = plain()
    load_lora(
        target, folder(tmp_path, make_adapter(saved_modules=modules), target_modules=["q_proj", "down_proj", "lm_head"])
    )
    assert len(lora_on(target)) == 4 and (target.lm_head.weight.asnumpy() == 1).all()


def test_a_saved_module_of_another_shape_or_name(tmp_path):
    plain_load_refused(
        folder(tmp_path, make_adapter(saved_modules={"lm_head.weight": np.ones((9, 6), np.float32)})),
        ShapeMismatchError,
        "PATH: lm_head.weight has 9 rows and the base 8: tokens were added to or taken from the vocabulary",
    )
    plain_load_refused(
        folder(tmp_path, make_adapter(saved_modules={"lm_head.weight": np.ones((8, 7), np.float32)})),
        ShapeMismatchError,
        "PATH: lm_head.weight, a saved module (modules_to_save), is [8, 7], the network's is [8, 6].",
    )
    plain_load_refused(
        folder(tmp_path, make_adapter(saved_modules={"model.norm_out.weight": np.ones(6, np.float32)})),
        UnexpectedTensorsError,
        "PATH holds model.norm_out.weight, a saved module (modules_to_save), which the network does not have.",
    )
    plain_load_refused(
        folder(
            tmp_path,
            make_adapter(saved_modules={"lm_head.weight": np.ones((8, 6), np.float32)}),
            modules_to_save=["lm_head", "embed_tokens"],
        ),
        MissingTensorsError,
        "modules_to_save names 'embed_tokens', but the file holds no tensor of it.",
    )
