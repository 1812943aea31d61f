"""load_lora where q, k, v or gate and up are one cell in the network but not in the adapter, or the reverse."""

import re
import warnings

import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense, apply_lora, load_lora, save_lora
from mindlora.core.errors import AdapterError, UnexpectedTensorsError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import joined_pairs
from mindlora.files.adapters.adapter import Adapter
from tests.support.networks import randomize
from tests.support.plain_networks import folder, lora_on, plain, plain_load_refused


class JoinedAttention(nn.Cell):
    """w_qkv with 2 key-value heads of size 2 and 4 heads, as MindFormers' LLamaAttention knows them."""

    def __init__(self):
        super().__init__()
        self.n_kv_head, self.head_dim = 2, 2
        self.w_qkv = nn.Dense(6, 16, has_bias=False)

    def construct(self, x):
        return self.w_qkv(x)


class JoinedLayer(nn.Cell):
    """A layer of a model that was built with qkv_concat."""

    def __init__(self):
        super().__init__()
        self.attention = JoinedAttention()
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
def test_separate_pairs_go_onto_joined_cells(tmp_path, leaves, use_rslora):
    adapter = separate_adapter(leaves, use_rslora=use_rslora)
    path, target = folder(tmp_path, adapter), plain(JoinedLayer)
    load_lora(target, path)
    x = np.random.default_rng(4).normal(size=(3, 6)).astype(np.float32)
    for holder, joined_leaf, parts, order in [
        # Rows by hand: two heads of q, then k, then v, of size 2, for each key-value head; w1 and w3 in turn.
        ("attention", "w_qkv", {"wq": 8, "wk": 4, "wv": 4}, [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]),
        ("feed_forward", "w_gate_hidden", {"w1": 5, "w3": 5}, [0, 5, 1, 6, 2, 7, 3, 8, 4, 9]),
    ]:
        cell = getattr(getattr(target, holder), joined_leaf)
        delta = [
            adapter.delta(f"{holder}.{leaf}") if leaf in leaves else np.zeros((rows, 6)) for leaf, rows in parts.items()
        ]
        weight = cell.weight.asnumpy() + np.concatenate(delta)[order]
        assert isinstance(cell, LoRADense) == any(leaf in leaves for leaf in parts)
        np.testing.assert_allclose(cell(Tensor(x)).asnumpy(), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_they_come_back_from_them_as_they_were(tmp_path):
    adapter = separate_adapter(("wq", "wv", "w1", "w3"))
    adapter.alphas = dict.fromkeys(adapter.alphas, 4.0)
    target = plain(JoinedLayer)
    load_lora(target, folder(tmp_path, adapter))
    save_lora(target, str(tmp_path / "again"))
    again = adapter_files.read(str(tmp_path / "again"))
    assert set(again.tensors) == set(adapter.tensors) and again.alphas == adapter.alphas
    for key, array in adapter.tensors.items():
        np.testing.assert_array_equal(again.tensors[key], array)


def test_a_pair_that_was_trained_as_one_comes_back_with_its_rank(tmp_path):
    source, target = plain(JoinedLayer), plain(JoinedLayer)
    for network, seed in ((source, 1), (target, 2)):
        apply_lora(network, LoraConfig(lora_rank=3, lora_alpha=4, target_modules=["w_qkv", "w_gate_hidden"]))
        randomize([p for p in network.get_parameters() if "lora" in p.name], seed)
    save_lora(source, str(tmp_path / "adapter"))
    assert adapter_files.read(str(tmp_path / "adapter")).rank("attention.wk") == 3
    load_lora(target, str(tmp_path / "adapter"))
    for name, parameter in source.parameters_dict().items():
        np.testing.assert_array_equal(target.parameters_dict()[name].asnumpy(), parameter.asnumpy())


def test_parts_that_share_one_a_and_differ_in_scale_are_not_one_pair(tmp_path):
    adapter = separate_adapter(("w1", "w3"))
    adapter.tensors["feed_forward.w3", "A"] = adapter.tensors["feed_forward.w1", "A"]
    adapter.alphas = {"feed_forward.w1": 4.0, "feed_forward.w3": 6.0}
    target = plain(JoinedLayer)
    before = target.feed_forward.w_gate_hidden.weight.asnumpy()
    delta = np.stack([adapter.delta(f"feed_forward.{leaf}") for leaf in ("w1", "w3")], axis=1).reshape(10, 6)
    load_lora(target, folder(tmp_path, adapter))
    x = np.random.default_rng(4).normal(size=(3, 6)).astype(np.float32)
    np.testing.assert_allclose(
        target.feed_forward.w_gate_hidden(Tensor(x)).asnumpy(), x @ (before + delta).T, rtol=1e-4, atol=1e-4
    )


class SeparateAttention(nn.Cell):
    """The same attention, built without qkv_concat."""

    def __init__(self):
        super().__init__()
        self.n_kv_head, self.head_dim = 2, 2
        self.wq, self.wk, self.wv = (nn.Dense(6, size, has_bias=False) for size in (8, 4, 4))


class SeparateLayer(nn.Cell):
    """Holds the cell under the name of the joined one."""

    def __init__(self):
        super().__init__()
        self.attention = SeparateAttention()


def test_a_joined_pair_goes_onto_separate_cells(tmp_path):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(3, 6)).astype(np.float32), rng.normal(size=(16, 3)).astype(np.float32)
    joint = Adapter({("attention.w_qkv", "A"): a, ("attention.w_qkv", "B"): b}, {"attention.w_qkv": 6.0})
    adapter_files.write(joint, str(tmp_path / "a.ckpt"), "ckpt")
    target = plain(SeparateLayer)
    target.attention.head_dim = 3
    with pytest.raises(AdapterError, match="in 16 rows, which do not match 2 key-value heads of size 3"):
        load_lora(target, str(tmp_path / "a.ckpt"))
    target.attention.head_dim = 2
    load_lora(target, str(tmp_path / "a.ckpt"))
    for leaf, rows in (("wq", [0, 1, 2, 3, 8, 9, 10, 11]), ("wk", [4, 5, 12, 13]), ("wv", [6, 7, 14, 15])):
        cell = getattr(target.attention, leaf)
        np.testing.assert_array_equal(cell.mindpet_delta_lora_a.asnumpy(), a)
        np.testing.assert_array_equal(cell.mindpet_delta_lora_b.asnumpy(), b[rows])
        assert cell.scale == 2.0


def test_an_adapter_with_a_joined_pair_and_its_parts_is_refused(tmp_path):
    adapter = separate_adapter(("wq",))
    for half, shape in (("A", (2, 6)), ("B", (16, 2))):
        adapter.tensors["attention.w_qkv", half] = np.ones(shape, np.float32)
    adapter.alphas["attention.w_qkv"] = 4.0
    adapter_files.write(adapter, str(tmp_path / "a.ckpt"), "ckpt")
    plain_load_refused(
        str(tmp_path / "a.ckpt"),
        UnexpectedTensorsError,
        "PATH holds 2 LoRA tensors that the network has no place for: attention.wq A, attention.wq B.",
        JoinedLayer,
    )


def test_a_base_with_the_same_weights_in_another_form_gets_no_warning(tmp_path):
    source = plain(SeparateLayer)
    apply_lora(source, LoraConfig(lora_rank=2, target_modules=["wq", "wk", "wv"], lora_b_init="ones"))
    save_lora(source, str(tmp_path / "adapter"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_lora(plain(JoinedLayer), str(tmp_path / "adapter"), on_base_mismatch="error")


def test_without_head_counts_the_message_names_them(tmp_path):
    path, target = folder(tmp_path, separate_adapter()), plain(JoinedLayer)
    target.attention.n_kv_head = None
    with pytest.raises(AdapterError) as error:
        load_lora(target, path)
    assert "a network says it by n_kv_heads" in str(error.value) and not lora_on(target)
    with pytest.raises(AdapterError, match="which do not match an unknown number of key-value heads"):
        joined_pairs.split_pairs(Adapter({("w_qkv", "A"): np.ones((1, 6)), ("w_qkv", "B"): np.ones((16, 1))}), "w_qkv")


class TwoLayers(nn.Cell):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.CellList([layer(), layer()])


def test_parts_that_differ_by_layer_are_saved_by_their_full_names(tmp_path):
    """By leaf names, target_modules would name q_proj and v_proj of both layers, and half of them have no pair."""
    adapter, network = Adapter({}), TwoLayers(JoinedLayer)
    for path, rows in (("layers.0.attention.wq", 8), ("layers.1.attention.wv", 4)):
        adapter.tensors |= {(path, "A"): np.ones((2, 6), np.float32), (path, "B"): np.ones((rows, 2), np.float32)}
        adapter.alphas[path] = 4.0
    load_lora(network, folder(tmp_path, adapter))
    save_lora(network, str(tmp_path / "again"))
    again = adapter_files.read(str(tmp_path / "again"))
    assert again.selection["target_modules"] == ["layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj"]
    # The network is a bare model, whose adapters are read under the names of the model with a head.
    assert {key: array.tobytes() for key, array in again.tensors.items()} == {
        (f"model.{path}", part): array.tobytes() for (path, part), array in adapter.tensors.items()
    }


def test_a_saved_module_that_the_network_has_joined_is_refused(tmp_path):
    adapter = separate_adapter(("wq",), saved_modules={"feed_forward.w1.weight": np.ones((5, 6), np.float32)})
    message = "which the network does not have: it is a part of feed_forward.w_gate_hidden there. Build the model with"
    with pytest.raises(UnexpectedTensorsError, match=re.escape(message)):
        load_lora(plain(JoinedLayer), folder(tmp_path, adapter))
