"""load_lora on a network without LoRADense, on concatenated cells, and with modules that were trained whole."""
import json
import logging
import os
import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file, save_file

from mindlora import LoRADense, LoraConfig, adapter_file, apply_lora, freeze_base, load_lora, save_lora
from mindlora.adapter import Adapter
from mindlora.dialects import concatenated
from mindlora.errors import (AdapterError, BaseMismatchError, MissingTensorsError, NotFiniteError, RankMismatchError,
                             ScaleMismatchError, ShapeMismatchError, UnexpectedTensorsError,
                             UnsupportedCellError)
from tests.helpers import HuggingFaceLayer, TinyModel, randomize, snapshot

CONFIG = "adapter_config.json"
SIZES = {"wq": (6, 6), "wk": (6, 4), "wv": (6, 4), "wo": (6, 6), "w1": (6, 9), "w2": (9, 6), "w3": (6, 9)}


def plain(cell=TinyModel, seed=5):
    network = cell()
    randomize(network.get_parameters(), seed)
    network.set_train(False)
    return network


def weights_of(network):
    return {p.name: p.asnumpy().astype(np.float64) for p in network.get_parameters()}


def pair(rng, leaf, rank, dtype=np.float32):
    in_channels, out_channels = SIZES[leaf]
    return rng.normal(size=(rank, in_channels)).astype(dtype), rng.normal(size=(out_channels, rank)).astype(dtype)


def make_adapter(leaves=("wq", "w2"), ranks=(2,), alphas=(3.0,), layers=(0, 1), seed=1, **fields):
    """Returns an Adapter with a pair for each leaf in each layer; ranks and alphas go round."""
    rng, tensors, alpha_of = np.random.default_rng(seed), {}, {}
    for index, (layer, leaf) in enumerate((layer, leaf) for layer in layers for leaf in leaves):
        path = f"model.layers.{layer}.{'feed_forward' if leaf in ('w1', 'w2', 'w3') else 'attention'}.{leaf}"
        tensors[path, "A"], tensors[path, "B"] = pair(rng, leaf, ranks[index % len(ranks)])
        alpha_of[path] = alphas[index % len(alphas)]
    return Adapter(tensors, alpha_of, **fields)


def folder(tmp_path, adapter, **config):
    """Writes PEFT's folder, with other fields in its configuration."""
    path = str(tmp_path / "adapter")
    adapter_file.write(adapter, path)
    file = os.path.join(path, CONFIG)
    with open(file, encoding="utf-8") as read:
        content = {**json.load(read), **config}
    with open(file, "w", encoding="utf-8") as written:
        json.dump(content, written)
    return path


def merged(network, adapter):
    """Returns the outputs of ``network`` with scale B A added to its weights by hand."""
    for path in adapter.paths:
        a, b = (adapter.tensors[path, half].astype(np.float64) for half in "AB")
        rank = len(a)
        scale = adapter.alphas[path] / (rank ** 0.5 if adapter.use_rslora else rank)
        (weight,) = (p for p in network.get_parameters() if p.name == path + ".weight")
        weight.set_data(Tensor((weight.asnumpy() + scale * b @ a).astype(np.float32)))
    return network(inputs()).asnumpy()


def inputs():
    return Tensor(np.random.default_rng(9).normal(size=(2, 3, 6)).astype(np.float32))


def lora_on(network):
    return [name for name, cell in network.cells_and_names() if isinstance(cell, LoRADense)]


def refused(path, error, message, cell=TinyModel, **arguments):
    """Asserts the error, and that the network is as it was: its cells, its parameters, every byte."""
    target = plain(cell)
    before, cells = snapshot(target), [type(found) for _, found in target.cells_and_names()]
    with pytest.raises(error) as caught:
        load_lora(target, path, **arguments)
    assert type(caught.value) is error and message.replace("PATH", str(path)) in str(caught.value)
    assert snapshot(target) == before and [type(found) for _, found in target.cells_and_names()] == cells


# What is loaded -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields", [
    {}, {"use_rslora": True}, {"ranks": (1, 3, 2)}, {"alphas": (3.0, 1.5, 8.0)}, {"layers": (1,)},
    {"ranks": (3, 1), "alphas": (2.5,), "use_rslora": True}, {"leaves": tuple(SIZES)}], ids=str)
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


@pytest.mark.parametrize("to, name", [("peft", "adapter"), ("mindformers", "a.safetensors"), ("ckpt", "a.ckpt"),
                                      ("slora", "adapter")])
def test_every_form_is_loaded_and_saved_again_bit_for_bit(tmp_path, to, name):
    adapter = make_adapter(ranks=(2, 2, 1) if to != "slora" else (2,), alphas=(4.0,))
    adapter_file.write(adapter, str(tmp_path / name), to)
    target = plain()
    load_lora(target, str(tmp_path / name))
    save_lora(target, str(tmp_path / "again"))
    again = adapter_file.read(str(tmp_path / "again"))
    assert again.alphas == adapter.alphas and set(again.tensors) == set(adapter.tensors)
    for place, array in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[place], array)


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
    first, second = (open(tmp_path / name / "adapter_model.safetensors", "rb").read() for name in ("adapter", "again"))
    assert first == second


def test_dropout_is_kept_for_whoever_trains_on(tmp_path):
    target = plain()
    load_lora(target, folder(tmp_path, make_adapter(dropout=0.25)))
    assert target.model.layers[0].attention.wq.dropout_rate == 0.25
    save_lora(target, str(tmp_path / "again"))
    assert adapter_file.read(str(tmp_path / "again")).dropout == 0.25


def test_a_network_under_hugging_face_names(tmp_path):
    source = plain(HuggingFaceLayer)
    apply_lora(source, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["q_proj"], lora_b_init="normal"))
    save_lora(source, str(tmp_path / "adapter"))
    target = plain(HuggingFaceLayer)
    load_lora(target, str(tmp_path / "adapter"))
    assert lora_on(target) == ["self_attn.q_proj"]
    np.testing.assert_array_equal(target(inputs()).asnumpy(), source(inputs()).asnumpy())


def test_a_graph_that_was_compiled_before_is_compiled_anew(tmp_path, mode):
    adapter, target = make_adapter(), plain()
    before = target(inputs()).asnumpy()
    load_lora(target, folder(tmp_path, adapter))
    assert np.abs(target(inputs()).asnumpy() - before).max() > 0.1


def test_it_can_be_trained_on(tmp_path):
    target = plain()
    load_lora(target, folder(tmp_path, make_adapter()))
    freeze_base(target)
    assert {p.name.rpartition(".")[2] for p in target.trainable_params()} == {"mindpet_delta_lora_a",
                                                                              "mindpet_delta_lora_b"}


@pytest.mark.parametrize("target_modules, config", [
    (["q_proj", "down_proj"], {}), (r".*\.(q|down)_proj", {}), ("model.layers.[01].(self_attn.q|mlp.down)_proj", {}),
    (["q_proj", "down_proj", "not_there"], {}),
    (["q_proj", "down_proj", "lm_head"], {"exclude_modules": ["lm_head"]})])
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
    load_lora(target, folder(tmp_path, make_adapter(layers=(1,)), target_modules=["q_proj", "down_proj"],
                             layers_to_transform=[1]))
    assert len(lora_on(target)) == 2


# What is refused ------------------------------------------------------------------------------------------------

def test_a_pair_that_the_configuration_names_and_the_file_lacks(tmp_path):
    path = folder(tmp_path, make_adapter(), target_modules=["q_proj", "v_proj", "down_proj"])
    refused(path, MissingTensorsError, "PATH lacks 4 LoRA tensors of the network: model.layers.{0..1}.attention.wv A, "
            "model.layers.{0..1}.attention.wv B. Check target_modules.")
    path = folder(tmp_path, make_adapter(layers=(1,)), target_modules=["q_proj", "down_proj"])
    refused(path, MissingTensorsError, "PATH lacks 4 LoRA tensors of the network: model.layers.0.attention.wq A")


def test_a_pair_that_the_network_has_no_place_for(tmp_path, caplog):
    path = folder(tmp_path, make_adapter(layers=(0, 1, 2)))
    refused(path, UnexpectedTensorsError, "PATH holds 4 LoRA tensors that the network has no place for: "
            "model.layers.2.feed_forward.w2 A, model.layers.2.feed_forward.w2 B, model.layers.2.attention.wq A, "
            "model.layers.2.attention.wq B.")
    target = plain()
    with caplog.at_level(logging.WARNING, "mindlora"):
        load_lora(target, path, strict=False)
    assert len(lora_on(target)) == 4 and "Loading the rest, as strict is False." in caplog.text


def test_shapes_numbers_and_bases_are_checked_before_anything_changes(tmp_path):
    adapter = make_adapter()
    adapter.tensors["model.layers.1.attention.wq", "A"] = np.ones((2, 7), np.float32)
    refused(folder(tmp_path, adapter), ShapeMismatchError, "model.layers.1.attention.wq A is [2, 7], the network's is "
            "[2, 6]")
    path = folder(tmp_path, make_adapter())
    tensors = load_file(os.path.join(path, "adapter_model.safetensors"))
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"][-1, -1] = np.inf
    save_file(tensors, os.path.join(path, "adapter_model.safetensors"))
    refused(path, NotFiniteError, "PATH holds tensors with NaN or infinity: model.layers.0.feed_forward.w2 B.")
    source = plain(seed=6)
    apply_lora(source, LoraConfig(lora_rank=2, target_modules=["wq"]))
    save_lora(source, str(tmp_path / "adapter"))
    refused(path, BaseMismatchError, "PATH was trained on another base", on_base_mismatch="error")


def test_an_adapter_that_does_not_say_its_alpha_needs_a_network_that_does(tmp_path):
    adapter = make_adapter()
    path = str(tmp_path / "llama_lora.ckpt")
    ms.save_checkpoint([{"name": f"{place[0]}.mindpet_delta_lora_{place[1].lower()}", "data": Tensor(array)}
                        for place, array in adapter.tensors.items()], path)
    refused(path, ScaleMismatchError, "does not say lora_alpha")
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
    refused(path, UnsupportedCellError, "wq: Other has a forward of its own", Net)


def test_a_network_that_was_built_with_other_ranks_for_some_cells(tmp_path):
    path = folder(tmp_path, make_adapter(("wq", "wk"), ranks=(2, 3), alphas=(3.0, 5.0)))
    target = plain()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "wk"]))
    with pytest.raises(RankMismatchError) as error:
        load_lora(target, path)
    assert str(error.value) == (f"{path} has rank 3, the network was built with lora_rank 2: set lora_rank to 3 "
                                "(rank_pattern) for model.layers.{0..1}.attention.wk.")
    target = plain()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "wk"], rank_pattern={"wk": 3}))
    with pytest.raises(ScaleMismatchError) as error:
        load_lora(target, path)
    assert str(error.value) == (
        f"{path} was trained with lora_alpha 5, the network was built with 3: set lora_alpha to 5 (alpha_pattern) for "
        "model.layers.{0..1}.attention.wk, or its effect is scaled wrongly.")
    target = plain()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "wk"], rank_pattern={"k_proj": 3},
                                  alpha_pattern={r".*\.wk": 5}))
    load_lora(target, path)


def test_a_network_that_scales_by_the_root_where_the_adapter_does_not(tmp_path):
    target = plain()
    apply_lora(target, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=["wq", "w2"], use_rslora=True))
    path = folder(tmp_path, make_adapter())
    with pytest.raises(ScaleMismatchError) as error:
        load_lora(target, path)
    assert str(error.value) == (f"{path} was trained with use_rslora False, the network was built with True: set "
                                "use_rslora to False, or its effect is scaled wrongly.")


# Concatenated cells ---------------------------------------------------------------------------------------------

class ConcatenatedAttention(nn.Cell):
    """w_qkv with 2 key-value heads of size 2 and 4 heads, as MindFormers' LLamaAttention knows them."""

    def __init__(self):
        super().__init__()
        self.n_kv_head, self.head_dim = 2, 2
        self.w_qkv = nn.Dense(6, 16, has_bias=False)

    def construct(self, x):
        return self.w_qkv(x)


class ConcatenatedLayer(nn.Cell):
    """A layer of a model that was built with qkv_concat."""

    def __init__(self):
        super().__init__()
        self.attention = ConcatenatedAttention()
        self.feed_forward = nn.Cell()
        self.feed_forward.w_gate_hidden = nn.Dense(6, 10, has_bias=False)

    def construct(self, x):
        return self.attention(x).sum() + self.feed_forward.w_gate_hidden(x)


def separate_adapter(leaves=("wq", "wk", "wv", "w1", "w3"), **fields):
    sizes = {"wq": 8, "wk": 4, "wv": 4, "w1": 5, "w3": 5}
    rng, adapter = np.random.default_rng(3), Adapter({}, **fields)
    for index, leaf in enumerate(leaves):
        path = f"{'attention' if leaf in ('wq', 'wk', 'wv') else 'feed_forward'}.{leaf}"
        adapter.tensors[path, "A"] = rng.normal(size=(2, 6)).astype(np.float32)
        adapter.tensors[path, "B"] = rng.normal(size=(sizes[leaf], 2)).astype(np.float32)
        adapter.alphas[path] = (4.0, 4.0, 6.0)[index % 3]
    return adapter


@pytest.mark.parametrize("leaves", [("wq", "wk", "wv", "w1", "w3"), ("wq",), ("wv", "w3"), ("wq", "wv")])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_separate_pairs_go_onto_concatenated_cells(tmp_path, leaves, use_rslora):
    adapter = separate_adapter(leaves, use_rslora=use_rslora)
    path, target = folder(tmp_path, adapter), plain(ConcatenatedLayer)
    load_lora(target, path)
    x = np.random.default_rng(4).normal(size=(3, 6)).astype(np.float32)
    for holder, concatenated_leaf, parts, order in [
            # Rows by hand: two heads of q, then k, then v, of size 2, for each key-value head; w1 and w3 in turn.
            ("attention", "w_qkv", {"wq": 8, "wk": 4, "wv": 4},
             [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]),
            ("feed_forward", "w_gate_hidden", {"w1": 5, "w3": 5}, [0, 5, 1, 6, 2, 7, 3, 8, 4, 9])]:
        cell = getattr(getattr(target, holder), concatenated_leaf)
        delta = [adapter.delta(f"{holder}.{leaf}") if leaf in leaves else np.zeros((rows, 6)) for leaf, rows in
                 parts.items()]
        weight = cell.weight.asnumpy() + np.concatenate(delta)[order]
        assert isinstance(cell, LoRADense) == any(leaf in leaves for leaf in parts)
        np.testing.assert_allclose(cell(Tensor(x)).asnumpy(), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_they_come_back_from_them_as_they_were(tmp_path):
    adapter = separate_adapter(("wq", "wv", "w1", "w3"))
    adapter.alphas = {path: 4.0 for path in adapter.alphas}
    target = plain(ConcatenatedLayer)
    load_lora(target, folder(tmp_path, adapter))
    save_lora(target, str(tmp_path / "again"))
    again = adapter_file.read(str(tmp_path / "again"))
    assert set(again.tensors) == set(adapter.tensors) and again.alphas == adapter.alphas
    for place, array in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[place], array)


def test_a_pair_that_was_trained_as_one_comes_back_with_its_rank(tmp_path):
    source, target = plain(ConcatenatedLayer), plain(ConcatenatedLayer)
    for network, seed in ((source, 1), (target, 2)):
        apply_lora(network, LoraConfig(lora_rank=3, lora_alpha=4, target_modules=["w_qkv", "w_gate_hidden"]))
        randomize([p for p in network.get_parameters() if "lora" in p.name], seed)
    save_lora(source, str(tmp_path / "adapter"))
    assert adapter_file.read(str(tmp_path / "adapter")).rank("attention.wk") == 3
    load_lora(target, str(tmp_path / "adapter"))
    for name, parameter in source.parameters_dict().items():
        np.testing.assert_array_equal(target.parameters_dict()[name].asnumpy(), parameter.asnumpy())


def test_parts_that_share_one_a_and_differ_in_scale_are_not_one_pair(tmp_path):
    adapter = separate_adapter(("w1", "w3"))
    adapter.tensors["feed_forward.w3", "A"] = adapter.tensors["feed_forward.w1", "A"]
    adapter.alphas = {"feed_forward.w1": 4.0, "feed_forward.w3": 6.0}
    target = plain(ConcatenatedLayer)
    before = target.feed_forward.w_gate_hidden.weight.asnumpy()
    delta = np.stack([adapter.delta(f"feed_forward.{leaf}") for leaf in ("w1", "w3")], axis=1).reshape(10, 6)
    load_lora(target, folder(tmp_path, adapter))
    x = np.random.default_rng(4).normal(size=(3, 6)).astype(np.float32)
    np.testing.assert_allclose(target.feed_forward.w_gate_hidden(Tensor(x)).asnumpy(), x @ (before + delta).T,
                               rtol=1e-4, atol=1e-4)


class SeparateAttention(nn.Cell):
    """The same attention, built without qkv_concat."""

    def __init__(self):
        super().__init__()
        self.n_kv_head, self.head_dim = 2, 2
        self.wq, self.wk, self.wv = (nn.Dense(6, size, has_bias=False) for size in (8, 4, 4))


class SeparateLayer(nn.Cell):
    """Holds it under the name that the concatenated one has."""

    def __init__(self):
        super().__init__()
        self.attention = SeparateAttention()


def test_a_joint_pair_goes_onto_separate_cells(tmp_path):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(3, 6)).astype(np.float32), rng.normal(size=(16, 3)).astype(np.float32)
    joint = Adapter({("attention.w_qkv", "A"): a, ("attention.w_qkv", "B"): b}, {"attention.w_qkv": 6.0})
    adapter_file.write(joint, str(tmp_path / "a.ckpt"), "ckpt")
    target = plain(SeparateLayer)
    target.attention.head_dim = 3
    with pytest.raises(AdapterError, match="in 16 rows, which 2 key-value heads of size 3 do not divide"):
        load_lora(target, str(tmp_path / "a.ckpt"))
    target.attention.head_dim = 2
    load_lora(target, str(tmp_path / "a.ckpt"))
    for leaf, rows in (("wq", [0, 1, 2, 3, 8, 9, 10, 11]), ("wk", [4, 5, 12, 13]), ("wv", [6, 7, 14, 15])):
        cell = getattr(target.attention, leaf)
        np.testing.assert_array_equal(cell.mindpet_delta_lora_a.asnumpy(), a)
        np.testing.assert_array_equal(cell.mindpet_delta_lora_b.asnumpy(), b[rows])
        assert cell.scale == 2.0


def test_an_adapter_with_a_joint_pair_and_its_parts_is_refused(tmp_path):
    adapter = separate_adapter(("wq",))
    for half, shape in (("A", (2, 6)), ("B", (16, 2))):
        adapter.tensors["attention.w_qkv", half] = np.ones(shape, np.float32)
    adapter.alphas["attention.w_qkv"] = 4.0
    adapter_file.write(adapter, str(tmp_path / "a.ckpt"), "ckpt")
    refused(str(tmp_path / "a.ckpt"), UnexpectedTensorsError, "PATH holds 2 LoRA tensors that the network has no place "
            "for: attention.wq A, attention.wq B.", ConcatenatedLayer)


def test_of_a_base_that_keeps_the_same_weights_in_another_form_nothing_is_said(tmp_path):
    source = plain(SeparateLayer)
    apply_lora(source, LoraConfig(lora_rank=2, target_modules=["wq", "wk", "wv"], lora_b_init="ones"))
    save_lora(source, str(tmp_path / "adapter"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(plain(ConcatenatedLayer), str(tmp_path / "adapter"), on_base_mismatch="error")


def test_without_the_heads_it_says_what_is_missing(tmp_path):
    path, target = folder(tmp_path, separate_adapter()), plain(ConcatenatedLayer)
    target.attention.n_kv_head = None
    with pytest.raises(AdapterError) as error:
        load_lora(target, path)
    assert "Give the model's n_kv_heads" in str(error.value) and not lora_on(target)
    with pytest.raises(AdapterError, match="which None key-value heads"):
        concatenated.split_pairs(Adapter({("w_qkv", "A"): np.ones((1, 6)), ("w_qkv", "B"): np.ones((16, 1))}), "w_qkv")


# Modules that were trained whole --------------------------------------------------------------------------------

def test_modules_trained_whole_are_loaded_marked_and_saved_again(tmp_path):
    rng = np.random.default_rng(2)
    whole = {"lm_head.weight": rng.normal(size=(8, 6)).astype(np.float32)}
    path = folder(tmp_path, make_adapter(whole=whole))
    assert adapter_file.read(path).whole.keys() == {"lm_head.weight"}
    target = plain()
    load_lora(target, path)
    np.testing.assert_array_equal(target.lm_head.weight.asnumpy(), whole["lm_head.weight"])
    freeze_base(target)
    assert target.lm_head.weight.requires_grad and not target.model.layers[0].attention.wo.weight.requires_grad
    save_lora(target, str(tmp_path / "again"))
    again = adapter_file.read(str(tmp_path / "again"))
    np.testing.assert_array_equal(again.whole["lm_head.weight"], whole["lm_head.weight"])
    with open(tmp_path / "again" / CONFIG, encoding="utf-8") as file:
        assert json.load(file)["modules_to_save"] == ["lm_head"]


def test_modules_to_save_of_a_configuration_are_trained_and_saved(tmp_path):
    source = plain()
    report = apply_lora(source, LoraConfig(
        lora_rank=2, target_modules=["wq"], modules_to_save=["lm_head", "model.layers.1.attention_norm"],
        lora_b_init="ones"))
    freeze_base(source)
    assert {p.name for p in source.trainable_params() if "lora" not in p.name} == {
        "lm_head.weight", "model.layers.1.attention_norm.gamma", "model.layers.1.attention_norm.beta"}
    assert report.trainable == sum(p.size for p in source.trainable_params())
    randomize([source.lm_head.weight], 7)
    save_lora(source, str(tmp_path / "adapter.ckpt"), "ckpt")
    target = plain()
    load_lora(target, str(tmp_path / "adapter.ckpt"))
    np.testing.assert_array_equal(target(inputs()).asnumpy(), source(inputs()).asnumpy())


def test_a_module_that_was_trained_whole_needs_no_pair(tmp_path):
    whole = {"lm_head.weight": np.ones((8, 6), np.float32)}
    target = plain()
    load_lora(target, folder(tmp_path, make_adapter(whole=whole), target_modules=["q_proj", "down_proj", "lm_head"]))
    assert len(lora_on(target)) == 4 and (target.lm_head.weight.asnumpy() == 1).all()


def test_a_whole_module_that_does_not_fit(tmp_path):
    refused(folder(tmp_path, make_adapter(whole={"lm_head.weight": np.ones((9, 6), np.float32)})), ShapeMismatchError,
            "PATH: lm_head.weight, trained whole (modules_to_save), is [9, 6], the network's is [8, 6].")
    refused(folder(tmp_path, make_adapter(whole={"model.norm_out.weight": np.ones(6, np.float32)})),
            UnexpectedTensorsError, "PATH holds model.norm_out.weight, trained whole (modules_to_save), which the "
            "network does not have.")
    refused(folder(tmp_path, make_adapter(whole={"lm_head.weight": np.ones((8, 6), np.float32)}),
                   modules_to_save=["lm_head", "embed_tokens"]), MissingTensorsError,
            "modules_to_save names 'embed_tokens', and no tensor is that module's.")
