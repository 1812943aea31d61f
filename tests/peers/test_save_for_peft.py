"""Adapters trained on MindFormers' networks and loaded by PEFT unchanged: the same logits and no warning.

peft_side.py checks for every adapter that PEFT does not warn and holds exactly the tensors of the file.
"""

import types

import mindspore as ms
import numpy as np
import pytest

from mindlora import save_lora
from mindlora.models import names
from mindlora.network import tree
from tests.peers.test_load_from_peft import ending_of
from tests.support.peers import cases, trained
from tests.support.peers.peer import read_json, stored
from tests.support.what_runs import shows

DROPOUT = {"VeRA": "vera_dropout", "MiSS": "miss_dropout"}
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


# What trained.CONFIGS shows, beside LoRA.
SHOWN = {
    "patterns-rslora": ["rslora"],
    "whole-embedding": ["saved_modules"],
    "frozen-a": ["lora_fa"],
    "dora": ["dora"],
    "vera": ["vera"],
    "miss": ["miss"],
    "embedding": ["embedding"],
}


def configurations():
    for name in trained.CONFIGS:
        yield pytest.param(name, marks=[shows(feature, "llama") for feature in ["lora", *SHOWN.get(name, [])]])


@pytest.fixture(scope="module", params=configurations())
def run(request, made, make_network, tmp_path_factory):
    """One adapter, trained and saved: its network, configuration, folder and training losses."""
    model, config = trained.CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("trained") / request.param
    network = make_network(model)
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    losses = trained.train(network, config)
    ms.set_context(mode=before)
    save_lora(network, str(folder), base_model=str(made.models[model]))
    return types.SimpleNamespace(network=network, model=model, config=config, folder=folder, losses=losses)


def test_peft_gives_the_same_logits(run, logits_of, peft_logits):
    assert run.losses[-1] < run.losses[0]
    ours = logits_of(run.network)
    assert np.abs(ours - peft_logits(run.model)).max() > 0.01
    np.testing.assert_allclose(ours, peft_logits(run.model, run.folder), rtol=0, atol=2e-5)


def test_peft_has_the_same_scale_of_each_cell(run, peer, made):
    cells = {
        names.to_hugging_face(path): [cell.lora_rank, cell.lora_alpha, pytest.approx(cell.scale)]
        for path, cell in tree.lora_cells(run.network)
    }
    assert peer.describe(model=made.models[run.model], adapter=run.folder) == cells


def test_file_holds_what_was_trained(run):
    """Each tensor has the dtype and the bits of its parameter; the configuration names the base and the dropout."""
    expected = {}
    for path, cell in tree.lora_cells(run.network):
        for part, parameter in cell.parts().items():
            expected[f"base_model.model.{names.to_hugging_face(path)}.{ending_of(path, part)}"] = parameter
        for part, parameter in cell.shared_parts().items():
            expected[f"base_model.vera_{part}"] = parameter
    for parameter in tree.saved_module_parameters(run.network):
        expected["base_model.model." + names.parameter_to_hugging_face(parameter.name)] = parameter
    found = stored(run.folder / cases.WEIGHTS)
    assert set(found) == set(expected)
    for key, parameter in expected.items():
        dtype, shape, content = found[key]
        assert dtype == DTYPES[run.config.param_init_type if ".lora_" in key else "float32"]
        array = parameter.asnumpy() if dtype != "BF16" else None
        # PEFT's block of MiSS is [r, out].
        turns = key.endswith(".miss_block")
        assert shape == tuple(parameter.shape)[:: -1 if turns else 1]
        if array is not None:
            assert content == (array.T if turns else array).tobytes()
    config = read_json(run.folder, "adapter_config.json")
    assert config[DROPOUT.get(run.config.variant.name, "lora_dropout")] == run.config.lora_dropout
    assert config["base_model_name_or_path"].endswith(run.model)


def test_peft_saves_the_same_again(run, peer, made, tmp_path):
    """PEFT writes the same file after loading it, in PEFT's float32."""
    peer.save_again(model=made.models[run.model], adapter=run.folder, folder=tmp_path / "again")
    theirs, ours = stored(tmp_path / "again" / cases.WEIGHTS), stored(run.folder / cases.WEIGHTS)
    # Where lm_head or the embedding is a target, PEFT also saves the base's own weight.
    for module in ("lm_head", "model.embed_tokens"):
        theirs.pop(f"base_model.model.{module}.base_layer.weight", None)
    assert set(theirs) == set(ours)
    if run.config.param_init_type == "float32":
        assert theirs == ours
