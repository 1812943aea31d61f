"""mindlora on a network of MindFormers' mcore models: trained as MindFormers' own LoRA, saved, loaded and merged."""

import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import load_file

from mindlora import (
    LoraConfig,
    apply_lora,
    freeze_base,
    load_lora,
    merge_lora,
    save_lora,
    trainable_summary,
    unmerge_lora,
)
from mindlora.core.errors import MergeError, TargetError
from mindlora.files.adapters import files
from mindlora.network.tree import lora_cells
from tests.support.mcore_networks import arrays, filled, tiny_deepseek_v3, tiny_qwen3, tokens, train
from tests.support.mcore_pynative import mcore_in_pynative

pytestmark = pytest.mark.usefixtures("module_in_graph_mode")

STEPS = 50
LAYER = "decoder.layers.0"
CELLS = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
CONFIG = {"target_modules": "all-linear", "lora_rank": 3, "lora_alpha": 6, "lora_a_init": "normal"}


@pytest.fixture(scope="module")
def run():
    """A network with mindlora's adapters that has trained, its losses, and all its parameters before that."""
    network = tiny_qwen3()
    apply_lora(network, LoraConfig(**CONFIG))
    freeze_base(network)
    before = arrays(network)
    return network, train(network, STEPS), before


# Training -------------------------------------------------------------------------------------------------------


def test_the_losses_are_those_of_mindformers_own_lora(run):
    _, losses, start = run
    theirs = with_mindformers_lora(start)
    with mcore_in_pynative():
        reference = train(theirs, STEPS)
    assert reference[-1] < 0.8 * reference[0]
    np.testing.assert_allclose(losses, reference, rtol=1e-4)


def with_mindformers_lora(start):
    """Returns the network with MindFormers' own LoRA, of the same base, A and B."""
    from mindformers.pet.pet_config import LoraConfig as TheirConfig
    from mindformers.pet.tuners.lora_adapter import LoraAdapter

    network = tiny_qwen3()
    config = TheirConfig(lora_rank=3, lora_alpha=6, lora_dropout=0.0, target_modules=".*linear_.*")
    network.model = LoraAdapter.get_pet_model(network.model, config)
    for parameter in network.get_parameters():
        # Their cells have fresh random weights, so the base is loaded again.
        name = parameter.name.removeprefix("model.")
        name = name.replace("lora_A.weight", "mindpet_delta_lora_a").replace("lora_B.weight", "mindpet_delta_lora_b")
        if name in start:
            parameter.set_data(Tensor(start[name]))
        parameter.requires_grad = "lora_A.weight" in parameter.name or "lora_B.weight" in parameter.name
    return network


def test_only_the_adapters_train_and_the_base_is_the_one_that_was_there(run):
    network, _, before = run
    trained = {p.name for p in network.trainable_params()}
    assert trained == {f"{LAYER}.{cell}.mindpet_delta_lora_{half}" for cell in CELLS for half in "ab"}
    plain = arrays(tiny_qwen3())
    for name, array in arrays(network).items():
        assert np.array_equal(array, before[name]) == (name not in trained), name
        assert name in trained or np.array_equal(array, plain[name]), name


def test_the_summary_counts_the_cells(run):
    lines = trainable_summary(run[0]).splitlines()
    count = sum(p.size for p in run[0].trainable_params())
    assert any("linear_qkv" in line and "32 x 96" in line for line in lines)
    assert lines[-1].startswith(f"trainable params: {count:,} || all params: ")


def test_mindformers_freezing_of_mcore_models_leaves_what_trains_to_mindlora(mindformers):
    from mindformers.pet.pet_model import get_pet_model

    from mindlora.training.launch import hooks  # noqa: F401  importing registers the pet type

    model = get_pet_model(tiny_qwen3(), {"pet_type": "lora", "target_modules": ["linear_qkv"]})
    cell = "decoder.layers.0.self_attention.linear_qkv"
    assert [p.name for p in model.trainable_params()] == [f"{cell}.mindpet_delta_lora_{half}" for half in "ab"]
    frozen_a = {
        "pet_type": "lora",
        "target_modules": ["linear_qkv"],
        "freeze_lora_a": True,
        "modules_to_save": ["norm"],
    }
    model = get_pet_model(tiny_qwen3(), frozen_a)
    assert [p.name for p in model.trainable_params()] == [
        f"{cell}.mindpet_delta_lora_b",
        "decoder.final_layernorm.weight",
    ]


# Names ----------------------------------------------------------------------------------------------------------


SELECTED = {
    "mcore's": (["linear_qkv", "linear_fc2"], CELLS[1::2]),
    "Hugging Face's": (["q_proj", "k_proj", "v_proj", "down_proj"], CELLS[1::2]),
    "MindFormers' regex": (".*linear_qkv|.*linear_proj", CELLS[:2]),
}


@pytest.mark.parametrize("names", SELECTED)
def test_target_modules_take_the_names_of_either_world(names):
    targets, ends = SELECTED[names]
    report = apply_lora(tiny_qwen3(), LoraConfig(target_modules=targets))
    assert set(report.replaced) == {f"model.decoder.layers.0.{end}" for end in ends}


def test_some_members_of_a_joined_cell_are_refused_by_name():
    with pytest.raises(
        TargetError, match=r"names q_proj, but here model\.decoder\.layers\.0\.self_attention\.linear_qkv"
    ):
        apply_lora(tiny_qwen3(), LoraConfig(target_modules=["q_proj"]))


def test_the_pet_config_of_mindformers_documentation_trains_the_embedding_too():
    regex = ".*word_embeddings|.*linear_qkv|.*linear_proj|.*linear_fc1|.*linear_fc2"
    network = tiny_qwen3()
    config = LoraConfig(
        target_modules=regex, lora_a_init="normal", lora_b_init="zeros", freeze_include=["*"], freeze_exclude=["*lora*"]
    )
    replaced = apply_lora(network, config).replaced
    assert set(replaced) == {"model.embedding.word_embeddings", *(f"model.{LAYER}.{cell}" for cell in CELLS)}
    freeze_base(network, config)
    assert sum("embedding.word_embeddings.mindpet_delta" in p.name for p in network.trainable_params()) == 2


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_output_layer_train_are_saved_and_come_back(tied, tmp_path):
    network = tiny_qwen3(tie_word_embeddings=tied)
    config = LoraConfig(target_modules=["embed_tokens", "lm_head"], lora_rank=3, lora_alpha=6)
    assert apply_lora(network, config).replaced == ("model.embedding.word_embeddings", "model.output_layer")
    freeze_base(network)
    cells = ("embedding.word_embeddings", "output_layer")
    parts = [f"{cell}.mindpet_delta_lora_{half}" for cell in cells for half in "ab"]
    assert [p.name for p in network.trainable_params()] == parts
    before = arrays(network)
    with mcore_in_pynative():
        losses = train(network, 30, 2e-2)
    assert losses[-5:].mean() < losses[:5].mean() - 0.1
    for name, array in arrays(network).items():
        assert np.array_equal(array, before[name]) == (name not in parts), name
    save_lora(network, tmp_path / "adapter")
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    expected = {f"base_model.model.model.embed_tokens.lora_embedding_{half}" for half in "AB"}
    assert expected | {f"base_model.model.lm_head.lora_{half}.weight" for half in "AB"} <= names
    other = tiny_qwen3(tie_word_embeddings=tied)
    load_lora(other, tmp_path / "adapter")
    trained, loaded = arrays(network), arrays(other)
    assert trained.keys() == loaded.keys() and all(np.array_equal(trained[name], loaded[name]) for name in trained)
    network.set_train(False)
    if tied:
        with pytest.raises(MergeError, match="shares its weight with"):
            merge_lora(network)
    else:
        ids = Tensor(tokens())
        with mcore_in_pynative():
            y = network(ids).asnumpy()
            merge_lora(network)
            np.testing.assert_allclose(network(ids).asnumpy(), y, rtol=0, atol=1e-4)


def test_multi_token_prediction_keeps_its_embedding_which_has_no_table_of_its_own(tmp_path):
    network, other = (tiny_deepseek_v3(num_nextn_predict_layers=1, first_k_dense_replace=1) for _ in range(2))
    report = apply_lora(network, LoraConfig(target_modules=".*word_embeddings"))
    assert report.replaced == ("model.embedding.word_embeddings",)
    save_lora(network, tmp_path / "adapter")
    load_lora(other, tmp_path / "adapter")
    assert [path for path, _ in lora_cells(other)] == ["embedding.word_embeddings"]


def test_a_tied_output_layer_gets_its_weight_only_where_it_can_take_an_adapter():
    network = tiny_qwen3(tie_word_embeddings=True)
    trainable_summary(network)
    assert network.model.output_layer.weight is None
    apply_lora(network, LoraConfig(target_modules=["lm_head"]))
    assert network.model.output_layer.weight is network.model.embedding.word_embeddings.weight


# Saving and loading ---------------------------------------------------------------------------------------------


def test_an_adapter_is_saved_under_hugging_faces_names_and_comes_back_bit_for_bit(run, tmp_path):
    network = run[0]
    save_lora(network, tmp_path / "adapter")
    adapter = files.read(str(tmp_path / "adapter"))
    sizes = {"attention.wq": (48, 32), "attention.wk": (24, 32), "attention.wv": (24, 32), "feed_forward.w3": (40, 32)}
    for end, (rows, columns) in sizes.items():
        path = f"model.layers.0.{end}"
        assert adapter.tensors[path, "A"].shape == (3, columns) and adapter.tensors[path, "B"].shape == (rows, 3)
    other = tiny_qwen3()
    load_lora(other, tmp_path / "adapter")
    pairs = {path: cell.pair() for path, cell in lora_cells(network)}
    for path, cell in lora_cells(other):
        for mine, loaded in zip(pairs.pop(path), cell.pair()):
            assert np.array_equal(mine, loaded)
    assert not pairs


def test_q_k_and_v_that_were_trained_apart_become_one_pair_of_three_times_the_rank(tmp_path):
    network = tiny_qwen3()
    apply_lora(network, LoraConfig(**CONFIG))
    filled(network, 3)
    save_lora(network, tmp_path / "adapter")
    adapter = files.read(str(tmp_path / "adapter"))
    rng = np.random.default_rng(0)
    for key, array in adapter.tensors.items():
        adapter.tensors[key] = rng.normal(size=array.shape).astype(np.float32)
    files.write(adapter, str(tmp_path / "apart"), "peft")
    other = tiny_qwen3()
    load_lora(other, tmp_path / "apart")
    cell = dict(lora_cells(other))["decoder.layers.0.self_attention.linear_qkv"]
    a, b = cell.pair()
    assert a.shape == (9, 32) and cell.scale == 2
    q, k, v = (
        adapter.tensors[f"model.layers.0.attention.{part}", "B"]
        @ adapter.tensors[f"model.layers.0.attention.{part}", "A"]
        for part in ("wq", "wk", "wv")
    )
    # For each key-value head: the two heads of q that share it, then k and v.
    rows = [block for head in range(2) for block in (q[24 * head :][:24], k[12 * head :][:12], v[12 * head :][:12])]
    np.testing.assert_allclose(b @ a, np.concatenate(rows), atol=1e-5)


def test_merging_adds_the_adapters_to_the_weights_and_comes_apart_again(run):
    network = run[0]
    network.set_train(False)
    weights = arrays(network)
    deltas = {path: cell.scale * np.matmul(*cell.pair()[::-1]) for path, cell in lora_cells(network)}
    merge_lora(network)
    for path, delta in deltas.items():
        merged = arrays(network)[f"{path}.weight"]
        np.testing.assert_allclose(merged, weights[f"{path}.weight"] + delta, atol=1e-6)
    unmerge_lora(network)
    assert all(np.array_equal(array, weights[name]) for name, array in arrays(network).items())


def test_a_base_loaded_after_the_adapters_is_the_one_they_are_on():
    network = tiny_qwen3()
    apply_lora(network, LoraConfig(**CONFIG))
    filled(network, seed=8)
    cell = dict(lora_cells(network))["decoder.layers.0.mlp.linear_fc1"]
    expected = arrays(tiny_qwen3(seed=8))["decoder.layers.0.mlp.linear_fc1.weight"]
    assert np.array_equal(cell.weight.asnumpy(), expected) and isinstance(cell, nn.Cell)


def test_vera_on_a_joined_cell_is_refused_before_it_trains_because_no_file_could_hold_it(mindformers):
    from mindformers.pet.pet_model import get_pet_model

    from mindlora.core.errors import ConfigError
    from mindlora.training.launch import hooks  # noqa: F401  importing registers the pet type

    pet = {"pet_type": "lora", "use_vera": True, "target_modules": ["linear_qkv", "linear_proj"]}
    with pytest.raises(
        ConfigError, match=r"use_vera is True, and decoder\.layers\.0\.self_attention\.linear_qkv do the"
    ):
        get_pet_model(tiny_qwen3(), dict(pet))
    model = get_pet_model(tiny_qwen3(), {**pet, "target_modules": ["o_proj", "down_proj"]})
    assert all("lambda" in p.name for p in model.trainable_params())
