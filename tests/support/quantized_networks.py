"""Networks with a base in NF4 and adapters on it."""

import numpy as np
from mindspore import Tensor, nn

from mindlora import LoraConfig, LoRADense, apply_lora, freeze_base
from mindlora.network.quantized.nf4 import NF4Dense
from tests.support.networks import TinyModel, adapters, randomize

FIELDS = {"lora_rank": 2, "lora_alpha": 3, "target_modules": ["wq", "w1"]}


QLORA = LoraConfig(**FIELDS, quantize_base="nf4")


def plain(seed=1):
    result = TinyModel()
    randomize(result.get_parameters(), seed)
    return result


def network(config=QLORA, seed=1, adapter=2):
    """Returns a quantized network whose base and adapters have normal values from their seeds."""
    result = plain(seed)
    apply_lora(result, config)
    freeze_base(result)
    randomize(adapters(result).values(), adapter)
    return result


def kinds(model):
    """Returns path -> class name of the linear cells."""
    return {
        path: type(cell).__name__
        for path, cell in model.cells_and_names()
        if isinstance(cell, (nn.Dense, NF4Dense, LoRADense))
    }


def x():
    return Tensor(np.random.default_rng(3).normal(size=(2, 3, 6)).astype(np.float32) / 8)
