"""LoRA on a convolution against PEFT's: outputs, gradients, the file, and the merged weight."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from safetensors.numpy import save_file

from mindlora import LoraConfig, apply_lora, load_lora, save_lora
from mindlora.network.merge import merge_lora
from tests.support.networks import WeightedSum
from tests.support.peers import cases
from tests.support.peers.peer import arrays, read_json, stored

IN, OUT, RANK = 4, 6, 2
# Name -> (kernel, keys of PyTorch's Conv2d, keys of MindSpore's).
CONVOLUTIONS = {
    "padded": (3, {"padding": 1}, {"pad_mode": "pad", "padding": 1}),
    "strided": ((3, 2), {"stride": 2}, {"pad_mode": "valid", "stride": 2}),
    "grouped": (3, {"groups": 2}, {"pad_mode": "valid", "group": 2}),
}


class Vision(nn.Cell):
    """One convolution under a name."""

    def __init__(self, kernel, **keys):
        super().__init__()
        self.patch = nn.Conv2d(IN, OUT, kernel, has_bias=True, **keys)

    def construct(self, x):
        return self.patch(x)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_equals_pefts(name, use_rslora, mode, peer, tmp_path):
    kernel, theirs, ours = CONVOLUTIONS[name]
    network, rng = Vision(kernel, **ours), np.random.default_rng(3)
    apply_lora(network, LoraConfig(target_modules=["patch"], lora_rank=RANK, lora_alpha=3, use_rslora=use_rslora))
    cell, x = network.patch, rng.normal(size=(2, IN, 7, 6)).astype(np.float32)
    tensors = {"x": x, "weights": rng.normal(size=network(Tensor(x)).shape).astype(np.float32)}
    for part, parameter in (("weight", cell.weight), ("bias", cell.bias), *cell.parts().items()):
        tensors[part] = rng.normal(size=parameter.shape).astype(np.float32)
        parameter.set_data(Tensor(tensors[part]))
    save_file(tensors, tmp_path / "tensors")
    peer.convolve(
        tensors=tmp_path / "tensors",
        folder=tmp_path / "theirs",
        conv={"sizes": [IN, OUT, kernel], **theirs},
        config={"r": RANK, "lora_alpha": 3, "use_rslora": use_rslora},
    )
    expected = arrays(tmp_path / "theirs" / "found")

    def assert_close(found, part):
        np.testing.assert_allclose(found.asnumpy(), expected[part], rtol=0, atol=2e-5 * np.abs(expected[part]).max())

    assert_close(network(Tensor(x)), "output")
    of_x, (of_a, of_b) = ms.grad(WeightedSum(network), 0, cell.lora_parameters())(Tensor(x), Tensor(tensors["weights"]))
    for found, part in ((of_x, "x"), (of_a, "A"), (of_b, "B")):
        assert_close(found, part)
    save_lora(network, str(tmp_path / "ours"))
    assert stored(tmp_path / "ours" / cases.WEIGHTS) == stored(tmp_path / "theirs" / cases.WEIGHTS)
    for field in ("r", "lora_alpha", "use_rslora", "target_modules"):
        assert (
            read_json(tmp_path, "ours", "adapter_config.json")[field]
            == read_json(tmp_path, "theirs", "adapter_config.json")[field]
        )
    other = Vision(kernel, **ours)
    for parameter, value in ((other.patch.weight, "weight"), (other.patch.bias, "bias")):
        parameter.set_data(Tensor(tensors[value]))
    load_lora(other, str(tmp_path / "theirs"))
    np.testing.assert_array_equal(other(Tensor(x)).asnumpy(), network(Tensor(x)).asnumpy())
    if "merged" in expected:
        merge_lora(network)
        assert_close(cell.weight, "merged")
