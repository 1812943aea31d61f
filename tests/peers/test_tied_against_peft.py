"""Adapters of a model with tied embeddings: merged, they are what PEFT computes with them."""

import json

import numpy as np
import pytest

from mindlora.files.base.merge import merge_checkpoint
from tests.support.peers import cases

KEEPS_EQUAL = {"ensure_weight_tying": True}
# Name -> the keys of PEFT's LoraConfig, and whether the merged model still has one table.
ADAPTERS = {
    "head": ({"target_modules": ["q_proj", "lm_head"]}, False),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "both": ({"target_modules": ["q_proj", "lm_head", "embed_tokens"]}, False),
    "dora of the head": ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, False),
    "head kept equal": ({"target_modules": ["q_proj", "lm_head"], **KEEPS_EQUAL}, True),
    "embedding kept equal": ({"target_modules": ["q_proj", "embed_tokens"], **KEEPS_EQUAL}, True),
    "saved head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    "saved embedding": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
    "saved and kept equal": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], **KEEPS_EQUAL}, True),
}


@pytest.fixture(scope="module")
def base(peer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "tied"
    shard_size, config = cases.MODELS["tied"]
    peer.make_model(folder=folder, seed=4, shard_size=shard_size, **config)
    return folder


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_merged_model_computes_what_peft_does_with_the_adapter(peer, base, tmp_path, name):
    config, is_tied = ADAPTERS[name]
    peer.make_adapter(
        model=base,
        folder=tmp_path / "adapter",
        seed=5,
        kind="LoraConfig",
        config={"r": 4, "lora_alpha": 6, **config},
        dtype="float32",
        safetensors=True,
        embeddings=False,
    )
    ids = np.arange(3, 19)[None].tolist()
    merge_checkpoint(str(base), str(tmp_path / "adapter"), str(tmp_path / "merged"))
    found = {}
    for model, adapter in ((base, tmp_path / "adapter"), (tmp_path / "merged", None), (base, None)):
        path = tmp_path / f"{len(found)}.npy"
        peer.logits(model=model, ids=ids, path=path, adapter=adapter)
        found[len(found)] = np.load(path)
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=2e-5)
    assert np.abs(found[1] - found[2]).max() > 0.01
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is is_tied
