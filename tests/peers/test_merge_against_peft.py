"""Adapters merged into the base, against PEFT's merge_and_unload on the same files."""

import numpy as np
import pytest

from mindlora import load_lora
from mindlora.files.adapters import files as adapter_files
from mindlora.files.base.merge import merge_checkpoint
from mindlora.models import names
from mindlora.network.merge import merge_and_unload
from tests.support.peers import cases
from tests.support.peers.peer import arrays


@pytest.fixture(scope="module")
def merged_by_peft(peer, made, tmp_path_factory):
    """Returns a function that returns the weights after PEFT's merge_and_unload, under MindFormers' names."""
    folder = tmp_path_factory.mktemp("merged")

    def merge(name):
        if not (folder / name).exists():
            peer.merge(
                model=made.models[cases.ADAPTERS[name]["model"]], adapter=made.adapters[name], folder=folder / name
            )
        return weights_of(folder / name)

    return merge


def weights_of(folder):
    """Returns the weights of a model folder of transformers, under MindFormers' names."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found.update({names.parameter_to_mindformers(key): array for key, array in arrays(file).items()})
    return found


def assert_same(weights, expected, base):
    """Asserts that weights agree with PEFT's; those without an adapter equal the base's, and at least one does not."""
    for key, array in expected.items():
        np.testing.assert_allclose(weights[key], array, rtol=0, atol=1e-6, err_msg=key)
        if np.array_equal(array, base[key]):
            np.testing.assert_array_equal(weights[key], base[key], err_msg=key)
    assert any(np.abs(array - base[key]).max() > 0.01 for key, array in expected.items())


@pytest.mark.parametrize("name", cases.ADAPTERS)
def test_network(name, made, make_network, logits_of, merged_by_peft, peft_logits):
    model = cases.ADAPTERS[name]["model"]
    network = make_network(model)
    base = {p.name: p.asnumpy().copy() for p in network.get_parameters()}
    load_lora(network, str(made.adapters[name]), allow_pickle=True)
    merge_and_unload(network)
    weights = {p.name: p.asnumpy() for p in network.get_parameters()}
    assert set(weights) == set(base)
    assert_same(weights, merged_by_peft(name), base)
    np.testing.assert_allclose(logits_of(network), peft_logits(model, made.adapters[name]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", cases.ADAPTERS)
def test_checkpoint(name, made, checkpoints, merged_by_peft, tmp_path):
    base = checkpoints(cases.ADAPTERS[name]["model"])
    merge_checkpoint(str(base), str(made.adapters[name]), str(tmp_path / "merged.safetensors"), allow_pickle=True)
    weights = arrays(tmp_path / "merged.safetensors")
    assert set(weights) == set(arrays(base))
    assert_same(weights, merged_by_peft(name), arrays(base))


@pytest.mark.parametrize("name", ["all-linear", "grouped"])
def test_checkpoint_of_hugging_face(name, made, merged_by_peft, peer, peft_logits, tmp_path):
    """A model folder of transformers is merged into one that transformers loads."""
    case = cases.ADAPTERS[name]
    merge_checkpoint(str(made.models[case["model"]]), str(made.adapters[name]), str(tmp_path / "merged"))
    assert_same(weights_of(tmp_path / "merged"), merged_by_peft(name), weights_of(made.models[case["model"]]))
    peer.logits(model=tmp_path / "merged", ids=made.ids.tolist(), path=tmp_path / "logits.npy")
    np.testing.assert_allclose(
        np.load(tmp_path / "logits.npy"), peft_logits(case["model"], made.adapters[name]), rtol=0, atol=2e-5
    )


def test_delta_is_peft_s(made, merged_by_peft, checkpoints):
    """Adapter.delta equals what PEFT adds to a weight."""
    base, expected = arrays(checkpoints("plain")), merged_by_peft("patterns-rslora")
    adapter = adapter_files.read(str(made.adapters["patterns-rslora"]))
    for path in adapter.paths:
        np.testing.assert_allclose(
            adapter.delta(path), expected[f"{path}.weight"] - base[f"{path}.weight"], rtol=0, atol=1e-6
        )
