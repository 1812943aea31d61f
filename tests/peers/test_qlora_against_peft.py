"""Adapters of an NF4 base in both directions, with the dequantized base in PEFT; and LoftQ by PEFT's decomposition."""

import shutil

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora import LoraConfig, load_lora, quantize_base, quantize_checkpoint, save_lora
from mindlora.core.numerics import initializers
from mindlora.core.numerics.nf4 import TENSOR_NAMES, Nf4Array, dequantize, quantize
from mindlora.models import names
from tests.support.peers import trained
from tests.support.peers.peer import arrays
from tests.support.what_runs import shows

MODEL = "grouped"
CONFIG = {"lora_rank": 4, "lora_alpha": 6, "target_modules": ["wq", "wv", "w2"], "quantize_base": "nf4"}


def dequantized(model, folder, stored=None):
    """Writes a model of transformers with dequantized weights: those of NF4, or those of a quantized file."""
    shutil.copytree(model, folder)
    for path in folder.glob("*.safetensors"):
        tensors = arrays(path)
        for name, array in tensors.items():
            cell = names.parameter_to_mindformers(name).rpartition(".")[0]
            if "_proj" in name:
                packed = (
                    quantize(array)
                    if stored is None
                    else Nf4Array(
                        **{field: stored[f"{cell}.{leaf}"] for field, leaf in TENSOR_NAMES.items()}, shape=array.shape
                    )
                )
                tensors[name] = dequantize(packed)
        save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def base(made, tmp_path_factory):
    """The folder of the model whose linear weights were quantized to NF4 and dequantized."""
    return dequantized(made.models[MODEL], tmp_path_factory.mktemp("qlora") / "base")


@pytest.fixture
def logits_by_peft(peer, made, tmp_path):
    """Returns a function that returns PEFT's logits for a model folder and an adapter."""

    def compute(model, adapter=None):
        peer.logits(model=model, ids=made.ids.tolist(), path=tmp_path / "logits.npy", adapter=adapter)
        return np.load(tmp_path / "logits.npy")

    return compute


def test_peft_loads_what_was_trained_here_on_nf4(base, made, make_network, logits_of, logits_by_peft, tmp_path):
    network, before = make_network(MODEL), ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    losses = trained.train(network, LoraConfig(**CONFIG))
    ms.set_context(mode=before)
    save_lora(network, str(tmp_path / "adapter"))
    ours = logits_of(network)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(ours, logits_by_peft(base, tmp_path / "adapter"), rtol=0, atol=2e-5)
    # The logits differ on the float base, and without the adapter.
    for others in (logits_by_peft(base), logits_by_peft(made.models[MODEL], tmp_path / "adapter")):
        assert np.abs(ours - others).max() > 0.01


@pytest.mark.parametrize("adapter", ["grouped", "layers"])
def test_what_peft_made_gives_the_same_here_on_nf4(adapter, made, base, make_network, logits_of, logits_by_peft):
    network = make_network(MODEL)
    quantize_base(network)
    load_lora(network, str(made.safetensors[adapter]))
    ours = logits_of(network)
    np.testing.assert_allclose(ours, logits_by_peft(base, made.safetensors[adapter]), rtol=0, atol=2e-5)
    assert np.abs(ours - logits_by_peft(base)).max() > 0.01


@shows("loftq", "llama")
def test_in_peft_loftqs_adapter_is_nearer_to_the_float_base_than_nf4_alone(made, base, logits_by_peft, tmp_path):
    config = LoraConfig(**{**CONFIG, "lora_rank": 12, "target_modules": "all-linear"}, lora_init="loftq_iter_5")
    report = quantize_checkpoint(
        str(made.models[MODEL]), str(tmp_path / "q.safetensors"), adapter=str(tmp_path / "adapter"), config=config
    )
    folder = dequantized(made.models[MODEL], tmp_path / "base", load_file(report.output))
    in_float = logits_by_peft(made.models[MODEL])
    errors = [
        np.linalg.norm(found - in_float) for found in (logits_by_peft(base), logits_by_peft(folder, report.adapter))
    ]
    print(f"logits in float to those on NF4: {errors[0]:.3g}, with LoftQ {errors[1]:.3g}")
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("shape", [(48, 96), (128, 64)], ids=str)
def test_loftq_by_turns_with_pefts_decomposition(shape, turns, peer, tmp_path):
    """Like PEFT's loftq_init, but with our quantization, because PEFT's needs CUDA."""
    weight = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    rest = weight
    for _ in range(turns):
        quantized = quantize(rest)
        save_file({"weight": weight - dequantize(quantized)}, tmp_path / "weight")
        peer.low_rank(path=str(tmp_path / "weight"), rank=6, output=str(tmp_path / "halves"))
        halves = arrays(tmp_path / "halves")
        rest = weight - halves["L"] @ halves["R"]
    found, a, b = initializers.loftq(weight, 6, quantize, dequantize, turns)
    # Numbers halfway between two codes may be rounded either way.
    assert np.mean(found.codes != quantized.codes) < 1e-3
    np.testing.assert_allclose(b @ a, halves["L"] @ halves["R"], rtol=0, atol=1e-4)
    signs = np.sign((a * halves["R"]).sum(axis=1))
    np.testing.assert_allclose(a * signs[:, None], halves["R"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(b * signs, halves["L"], rtol=0, atol=1e-3)
