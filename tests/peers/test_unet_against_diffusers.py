"""The UNet of examples/text_to_image with the weights and the adapters of diffusers' UNet, and the other way round."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, load_lora, save_lora
from tests.support.networks import adapters, randomize
from tests.support.small_unet import UNet

TIME = 7
ALPHAS = {"conv1": 1.5, "to_q": 7}
# Rounding in float32 through all cells, on outputs around 1.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def theirs(peer, tmp_path_factory):
    """Weights, inputs and an adapter of diffusers' UNet, and what it computes without and with it."""
    folder = tmp_path_factory.mktemp("unet")
    peer.diffusion_weights(path=folder / "weights.npz")
    peer.save_diffusion(folder=folder / "adapter", form="diffusers", alphas=ALPHAS)
    peer.diffusion_outputs(path=folder / "base.npz", inputs=folder / "inputs.npz")
    peer.diffusion_outputs(path=folder / "tuned.npz", adapter=str(folder / "adapter"))
    found = {name: dict(np.load(folder / f"{name}.npz")) for name in ("weights", "inputs", "base", "tuned")}
    return {**found, "adapter": str(folder / "adapter")}


@pytest.fixture
def network(theirs):
    result = UNet(channels=8, context_channels=12, heads=4, groups=4, picture_channels=4)
    weights = dict(theirs["weights"])
    for parameter in result.get_parameters():
        name = parameter.name.replace(".gamma", ".weight").replace(".beta", ".bias")
        parameter.set_data(Tensor(weights.pop(name)))
    assert not weights
    return result.set_train(False)


def outputs(network, theirs):
    before = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    inputs = theirs["inputs"]
    found = network(Tensor(inputs["picture"]), Tensor([TIME], ms.int32), Tensor(inputs["context"])).asnumpy()
    ms.set_context(mode=before)
    return found


def test_an_adapter_of_diffusers_computes_the_same_here(network, theirs):
    load_lora(network, theirs["adapter"], part="unet")
    network.set_train(False)
    assert abs(theirs["tuned"]["noise"] - theirs["base"]["noise"]).max() > 1000 * CLOSE
    np.testing.assert_allclose(outputs(network, theirs), theirs["tuned"]["noise"], rtol=0, atol=CLOSE)


def test_an_adapter_from_here_computes_the_same_in_diffusers(network, theirs, peer, tmp_path):
    targets = ["to_q", "to_out.0", "conv1", "time_emb_proj"]
    apply_lora(network, LoraConfig(lora_rank=2, lora_alpha=3, target_modules=targets, rank_pattern={"conv1": 3}))
    randomize(adapters(network).values(), 1)
    network.set_train(False)
    path = str(tmp_path / "ours")
    save_lora(network, path, "diffusers")
    peer.diffusion_outputs(path=tmp_path / "found.npz", adapter=path)
    with np.load(tmp_path / "found.npz") as found:
        assert abs(found["noise"] - theirs["base"]["noise"]).max() > 1000 * CLOSE
        np.testing.assert_allclose(found["noise"], outputs(network, theirs), rtol=0, atol=CLOSE)
