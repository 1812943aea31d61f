"""Networks whose adapters are initialized from the base (PiSSA, OLoRA), and a stand-in for training them."""

import numpy as np
from mindspore import Tensor

from mindlora import LoraConfig, apply_lora, freeze_base
from tests.support import networks

INITS = ["pissa", "pissa_niter_3", "olora"]
X = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)


def base(seed=3):
    """Returns the same plain network each time, with outputs of about 1."""
    network = networks.TinyModel()
    rng = np.random.default_rng(seed)
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(0.3 * rng.normal(size=parameter.shape).astype(np.float32)))
    return network.set_train(False)


def config(init="pissa", **fields):
    """Returns a configuration with a lora_init."""
    return LoraConfig(
        **{"lora_rank": 3, "lora_alpha": 4, "target_modules": ["wq", "wk", "w1", "w2"], "lora_init": init, **fields}
    )


def adapted(init="pissa", **fields):
    """Returns the base with adapters that are not initialized yet."""
    network = base()
    apply_lora(network, config(init, **fields))
    freeze_base(network)
    return network


def train(network, seed=7):
    """Moves every trainable parameter, as training would."""
    rng = np.random.default_rng(seed)
    for parameter in network.trainable_params():
        moved = networks.as_array(parameter) + 0.1 * rng.normal(size=parameter.shape)
        parameter.set_data(Tensor(moved.astype(np.float32), parameter.dtype))


def outputs(network):
    """Returns the outputs of a network in evaluation, for the same input each time."""
    network.set_train(False)
    return network(Tensor(X)).asnumpy()
