"""An adapter of a MindFormers mcore model, in PEFT on the Qwen3 of transformers: the same logits."""

import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, eva_adapter, load_lora, merge_and_unload, save_lora
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.files.adapters import files
from mindlora.files.base.merge import merge_checkpoint
from mindlora.network.tree import lora_cells
from tests.conftest import in_mode
from tests.support.mcore_networks import TINY, save_for_transformers, tiny_qwen3, tokens
from tests.support.mcore_pynative import pynative_operators
from tests.support.networks import normal
from tests.support.what_runs import shows

# The adapter whose network is compiled; those of the others are computed in PyNative. tests/e2e/test_variants.py
# compiles each variant, and tests/training/model/test_mcore.py a tied embedding and head.
COMPILED = "[linear cells]"
LAYERS, IDS, TOLERANCE = 2, tokens(rows=1), 2e-5


LORA = {"lora_rank": 4, "lora_alpha": 20}
# Name -> whether the model has one table for embedding and output layer, and what gets an adapter.
ADAPTERS = {
    "linear cells": (False, {**LORA, "target_modules": "all-linear", "modules_to_save": ["norm"]}),
    "embedding": (False, {**LORA, "target_modules": ".*word_embeddings|.*linear_qkv"}),
    "embedding and head": (False, {**LORA, "target_modules": ["embed_tokens", "lm_head"]}),
    "tied head": (True, {**LORA, "target_modules": ["lm_head", "linear_fc1"]}),
    "tied embedding": (True, {**LORA, "target_modules": ["embed_tokens"]}),
    "tied embedding and head": (True, {**LORA, "target_modules": ["embed_tokens", "lm_head", "linear_proj"]}),
    "ranks": (
        False,
        {
            **LORA,
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"linear_proj": 6, r"layers\.1\.mlp\.linear_fc1": 3},
            "alpha_pattern": {"linear_fc2": 5},
        },
    ),
    "dora": (False, {**LORA, "target_modules": "all-linear", "use_dora": True}),
    "miss": (False, {"lora_rank": 4, "target_modules": "all-linear", "use_miss": True}),
    "vera": (False, {"lora_rank": 6, "target_modules": ["linear_proj", "linear_fc2"], "use_vera": True}),
}


@pytest.fixture(autouse=True)
def _mode(request, mindformers):
    with in_mode(0 if COMPILED in request.node.name else 1), pynative_operators():
        yield


def qwen3(tied):
    """Returns a Qwen3 of two layers on which an adapter can be put, in evaluation mode."""
    return tiny_qwen3(num_hidden_layers=LAYERS, tie_word_embeddings=tied).set_train(False)


@pytest.fixture(scope="module")
def bases(mindformers, tmp_path_factory):
    """The same model as folders of transformers, converted by mindlora: whether it is tied -> folder."""
    folder = tmp_path_factory.mktemp("qwen3")
    return {
        tied: save_for_transformers(qwen3(tied), folder / str(tied), tie_word_embeddings=tied) for tied in (False, True)
    }


def with_adapter(tied, **fields):
    """Returns a Qwen3 with an adapter of random values."""
    network = qwen3(tied)
    apply_lora(network, LoraConfig(**fields))
    # Small values: logits of some 10, of which float32 has five digits after the point. DoRA's magnitudes are positive.
    for number, parameter in enumerate(p for _, cell in lora_cells(network) for p in cell.lora_parameters()):
        values = 0.2 * normal(*parameter.shape, seed=number)
        parameter.set_data(Tensor(values + 1.5 if "magnitude" in parameter.name else values))
    return network


def assert_same_parts(network, other):
    loaded = dict(lora_cells(other))
    for path, cell in lora_cells(network):
        for part, parameter in cell.parts().items():
            assert np.array_equal(parameter.asnumpy(), loaded[path].parts()[part].asnumpy()), (path, part)


@pytest.mark.parametrize("name", ADAPTERS)
@shows("embedding", "qwen3")
def test_peft_gives_the_same_logits(name, bases, peer, tmp_path):
    tied, targets = ADAPTERS[name]
    network = with_adapter(tied, **targets)
    ours = network(Tensor(IDS)).asnumpy()
    save_lora(network, tmp_path / "adapter")
    merge_checkpoint(str(bases[tied]), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    judged = {}
    for model, adapter in ((bases[tied], tmp_path / "adapter"), (tmp_path / "merged", None), (bases[tied], None)):
        path = tmp_path / f"{len(judged)}.npy"
        peer.logits(model=model, ids=IDS.tolist(), path=path, adapter=adapter)
        judged[len(judged)] = np.load(path).reshape(-1, TINY["vocab_size"])
    theirs, merged, plain = judged.values()
    assert np.abs(theirs - plain).max() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(merged, theirs, rtol=0, atol=TOLERANCE)
    other = qwen3(tied)
    load_lora(other, tmp_path / "adapter")
    assert_same_parts(network, other)


IN_4_BITS = {name: ADAPTERS[name][1] for name in ("dora", "miss", "vera")}
# Saved as the plain LoRA that it is.
IN_4_BITS["adalora"] = {"use_adalora": True, "init_r": 4, "target_r": 2, "target_modules": "all-linear"}


@pytest.fixture(scope="module")
def decoded(mindformers, tmp_path_factory):
    """The folder of transformers of the model whose linear cells have the weights that NF4 makes of them."""
    network = qwen3(False)
    for parameter in network.get_parameters():
        if ".linear_" in parameter.name and parameter.ndim == 2:
            parameter.set_data(Tensor(dequantize(quantize(parameter.asnumpy()))))
    return save_for_transformers(network, tmp_path_factory.mktemp("decoded") / "qwen3", tie_word_embeddings=False)


@pytest.mark.parametrize("name", IN_4_BITS)
@shows("nf4_variants", "qwen3")
def test_on_a_base_in_4_bits_the_logits_are_pefts_on_what_it_decodes_to(name, bases, decoded, peer, tmp_path):
    fields = {**IN_4_BITS[name], "quantize_base": "nf4"}
    network = with_adapter(False, **fields)
    assert {cell.quantization for _, cell in lora_cells(network)} == {"nf4"}
    ours = network(Tensor(IDS)).asnumpy()
    save_lora(network, tmp_path / "adapter")
    judged = []
    for model, adapter in ((decoded, tmp_path / "adapter"), (decoded, None), (bases[False], tmp_path / "adapter")):
        path = tmp_path / f"{len(judged)}.npy"
        peer.logits(model=model, ids=IDS.tolist(), path=path, adapter=adapter)
        judged.append(np.load(path).reshape(-1, TINY["vocab_size"]))
    np.testing.assert_allclose(ours, judged[0], rtol=0, atol=TOLERANCE)
    assert all(np.abs(judged[0] - other).max() > 0.1 for other in judged[1:])
    if name != "adalora":
        other = qwen3(False)
        apply_lora(other, LoraConfig(**fields))
        load_lora(other, tmp_path / "adapter", on_base_mismatch="error")
        assert_same_parts(network, other)
    merge_and_unload(network)
    np.testing.assert_allclose(network(Tensor(IDS)).asnumpy(), ours, rtol=0, atol=TOLERANCE)


def test_eva_finds_what_peft_finds_on_the_same_rows(bases, peer, tmp_path):
    """q, k and v are one cell here and three in PEFT, and read the same; with rho 1 each rank stays as it is."""
    batches = [(ids, ids % 4 == 0) for ids in (tokens(rows=2 if seed == 3 else 4, seed=seed) for seed in range(6))]
    config = LoraConfig(target_modules="all-linear", lora_rank=4, lora_alpha=8)
    ours = eva_adapter(qwen3(False), batches * 9, config, rho=1.0)
    files.write(ours.adapter, str(tmp_path / "ours"))
    peer.eva(
        model=bases[False],
        batches=[{"input_ids": ids.tolist(), "labels": np.where(on, ids, -100).tolist()} for ids, on in batches],
        config={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        eva_config={"rho": 1.0, "tau": 0.99},
        folder=str(tmp_path / "theirs"),
    )
    found, theirs = files.read(str(tmp_path / "ours")), files.read(str(tmp_path / "theirs"))
    assert sorted(found.paths) == sorted(theirs.paths) and len(theirs.paths) == 7 * LAYERS
    for path in theirs.paths:
        a, b = (adapter.tensors[path, "A"] for adapter in (found, theirs))
        assert np.linalg.norm(a @ b.T, axis=1).min() > 0.99
        assert found.scale(path) == theirs.scale(path) == 2
