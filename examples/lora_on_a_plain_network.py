"""LoRA on a plain MindSpore network: adapt it, train a few steps, save the adapter, load it onto a fresh network.

Run it with ``python examples/lora_on_a_plain_network.py``. It needs MindSpore, but no MindFormers and no NPU.
"""

import os
import tempfile

import mindspore as ms
import numpy as np
from mindspore import nn

import mindlora

ms.set_context(device_target="CPU")


class Classifier(nn.Cell):
    """Two linear cells. LoRA needs no more of a network than that its cells are nn.Dense."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Dense(16, 32, activation="relu")
        self.output = nn.Dense(32, 4)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.output(self.hidden(x))


def base_network() -> Classifier:
    """Returns a network with the same weights each time: it plays the pretrained base."""
    network, rng = Classifier(), np.random.default_rng(0)
    for parameter in network.get_parameters():
        parameter.set_data(ms.Tensor(0.3 * rng.standard_normal(parameter.shape), ms.float32))
    return network


def main() -> None:
    """Trains LoRA on random data and shows that the saved adapter gives the same outputs on a fresh base."""
    rng = np.random.default_rng(1)
    x = ms.Tensor(rng.standard_normal((64, 16)), ms.float32)
    labels = ms.Tensor(rng.integers(0, 4, 64), ms.int32)

    network = base_network()
    config = mindlora.LoraConfig(lora_rank=4, lora_alpha=8, target_modules=["hidden", "output"])
    mindlora.apply_lora(network, config)
    mindlora.freeze_base(network)
    print(mindlora.trainable_summary(network))

    loss_cell = nn.WithLossCell(network, nn.CrossEntropyLoss())
    step = nn.TrainOneStepCell(loss_cell, nn.Adam(network.trainable_params(), 0.02)).set_train()
    losses = [float(step(x, labels).asnumpy()) for _ in range(30)]
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")

    network.set_train(False)
    with tempfile.TemporaryDirectory() as folder:
        adapter = os.path.join(folder, "adapter")
        mindlora.save_lora(network, adapter)
        print(f"saved: {', '.join(sorted(os.listdir(adapter)))}")
        fresh = base_network()
        mindlora.load_lora(fresh, adapter)  # puts LoRA on the network as well: it had none
    difference = np.abs(fresh.set_train(False)(x).asnumpy() - network(x).asnumpy()).max()
    print(f"largest difference of the outputs after loading: {difference:.1e}")


if __name__ == "__main__":
    main()
