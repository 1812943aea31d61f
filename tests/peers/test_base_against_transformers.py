"""A base that base convert writes for Hugging Face, with the config.json made from a YAML, opened by transformers."""

import numpy as np
import pytest

from mindlora.files.base.convert import convert_base
from tests.support.peers import cases

# What a MindFormers YAML says of the models in cases.MODELS and the tensors do not show.
YAML = {"type": "LlamaConfig", "num_heads": 4, "seq_length": 64}
OF_MODEL = {"plain": {"rms_norm_eps": 1e-6}, "grouped": {"n_kv_heads": 2, "rms_norm_eps": 1e-3, "theta": 500.0}}


@pytest.mark.parametrize("name", OF_MODEL)
def test_transformers_computes_what_the_original_does(name, peer, made, tmp_path):
    convert_base(str(made.models[name]), str(tmp_path / "mindformers.ckpt"), "hf", "mindformers")
    written = tmp_path / "written"
    convert_base(str(tmp_path / "mindformers.ckpt"), str(written), None, "hf", model_config={**YAML, **OF_MODEL[name]})
    for model, path in ((made.models[name], "original.npy"), (written, "written.npy")):
        peer.logits(model=model, ids=made.ids.tolist(), path=tmp_path / path)
    original, found = (np.load(tmp_path / path) for path in ("original.npy", "written.npy"))
    assert original.shape[-1] == cases.VOCABULARY
    np.testing.assert_array_equal(found, original)
