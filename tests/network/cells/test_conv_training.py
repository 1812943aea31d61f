"""Convolutions and linear cells of one network fine-tuned together by MindSpore's own training; saved and loaded."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora import LoraConfig, apply_lora, freeze_base, load_lora, save_lora
from mindlora.files.adapters import files as adapter_files
from mindlora.network.cells.conv import LoRAConv2d
from mindlora.network.cells.dense import LoRADense
from mindlora.network.tree import lora_cells
from tests.support.networks import as_array, randomize, snapshot

TARGETS = ["down", "middle.0", "up", "time", "out"]


class UNet(nn.Cell):
    """A small U-Net that denoises: down, a convolution, up, joined with the input; a Dense takes the time."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(1, 8, 3, has_bias=True)
        self.down = nn.Conv2d(8, 16, 3, stride=2, has_bias=True)
        self.middle = nn.SequentialCell(nn.Conv2d(16, 16, 3, group=2, has_bias=True), nn.ReLU())
        self.time = nn.Dense(4, 16)
        self.up = nn.Conv2d(24, 8, 3, has_bias=True)
        self.out = nn.Conv2d(8, 1, 1, has_bias=True)
        self.relu = nn.ReLU()

    def construct(self, image, time):
        high = self.relu(self.enter(image))
        low = self.relu(self.down(high)) + self.time(time).reshape((-1, 16, 1, 1))
        low = self.middle(low)
        rows, columns = high.shape[-2:]
        wide = low.broadcast_to((2, 2, *low.shape)).transpose((2, 3, 4, 0, 5, 1))
        wide = wide.reshape(low.shape[:2] + (rows, columns))
        return self.out(self.relu(self.up(ops.concat((wide, high), 1))))


def unet(seed=1):
    network = UNet()
    rng = np.random.default_rng(seed)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor((0.2 * rng.normal(size=parameter.shape)).astype(np.float32)))
    return network


def images(seed=0):
    """Returns noisy stripes, their times and what they are without noise."""
    rng = np.random.default_rng(seed)
    clean = np.sin(np.arange(8)[None, :, None] * rng.uniform(0.5, 1.5, (8, 1, 1)) + np.zeros((1, 1, 8)))[:, None]
    times = rng.uniform(0, 1, (8, 1))
    noisy = clean + times[:, :, None, None] * rng.normal(size=clean.shape)
    return [
        Tensor(array.astype(np.float32))
        for array in (noisy, np.concatenate([times, times**2, np.sin(times), np.cos(times)], 1), clean)
    ]


@pytest.mark.parametrize(
    "mode, keys",
    [(ms.GRAPH_MODE, {}), (ms.PYNATIVE_MODE, {"use_rslora": True, "freeze_lora_a": True})],
    ids=["graph", "pynative, LoRA-FA and rsLoRA"],
    indirect=["mode"],
)
def test_the_loss_falls_and_the_adapter_does_the_same_in_a_fresh_network(mode, keys, tmp_path):
    noisy, times, clean = images()
    network = unet()
    config = LoraConfig(lora_rank=4, lora_alpha=8, target_modules=TARGETS, **keys)
    ms.set_seed(1)
    apply_lora(network, config)
    freeze_base(network)
    kinds = {path: type(cell) for path, cell in lora_cells(network)}
    assert kinds == {path: LoRADense if path == "time" else LoRAConv2d for path in TARGETS}
    before = snapshot(network)
    loss = nn.MSELoss()

    def forward(image, time, target):
        return loss(network(image, time), target)

    optimizer = nn.Adam(network.trainable_params(), 2e-2)
    gradient = ms.value_and_grad(forward, None, optimizer.parameters)
    network.set_train()
    losses = []
    for _ in range(8):
        value, gradients = gradient(noisy, times, clean)
        optimizer(gradients)
        losses.append(float(value.asnumpy()))
    assert losses[-1] < 0.8 * losses[0]
    changed = {name for name, content in snapshot(network).items() if content != before[name]}
    assert changed == {p.name for p in network.trainable_params()}
    network.set_train(False)
    save_lora(network, str(tmp_path / "adapter"))
    expected = network(noisy, times).asnumpy()
    assert adapter_files.read(str(tmp_path / "adapter")).use_rslora == keys.get("use_rslora", False)
    bare, adapted = unet(), unet()
    apply_lora(adapted, config)
    randomize([p for _, cell in lora_cells(adapted) for p in cell.lora_parameters()])
    for fresh in (bare, adapted):
        load_lora(fresh, str(tmp_path / "adapter"), on_base_mismatch="error")
        np.testing.assert_array_equal(fresh.set_train(False)(noisy, times).asnumpy(), expected)
    assert np.abs(unet().set_train(False)(noisy, times).asnumpy() - expected).max() > 0.1
    assert np.mean((expected - as_array(clean)) ** 2) < losses[0]
