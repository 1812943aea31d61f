"""The cells of variants on the Linear of MindFormers' PyNative models, beside those on nn.Dense; writes what they give.

The argument is where to write an archive of arrays: variant, which cell, and what. All cells have the same values.
Those of MindFormers are made without values, as it makes models, and differentiated by Tensor.backward(); the others
by value_and_grad.
"""

import sys
import types

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn

from tests.support import pynative_cpu
from tests.support.backward import backward_gradients

IN, OUT, RANK = 10, 7, 3
# Name -> fields of the configuration.
VARIANTS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "freeze_a": {"freeze_lora_a": True},
    "dora": {"use_dora": True},
    "miss": {"use_miss": True, "lora_alpha": RANK},
    "vera": {"use_vera": True, "lora_alpha": RANK},
    "adalora": {"use_adalora": True, "init_r": RANK, "target_r": 2},
    "qlora": {"quantize_base": "nf4"},
    "dora in 4 bits": {"use_dora": True, "quantize_base": "nf4"},
    "miss in 4 bits": {"use_miss": True, "lora_alpha": RANK, "quantize_base": "nf4"},
    "vera in 4 bits": {"use_vera": True, "lora_alpha": RANK, "quantize_base": "nf4"},
    "adalora in 4 bits": {"use_adalora": True, "init_r": RANK, "target_r": 2, "quantize_base": "nf4"},
}


def made_without_values(config):
    """Returns a cell as MindFormers' Trainer makes it: without values, in place of a Linear, then materialized."""
    from mindformers.pynative.layers.linear import Linear

    with ms.DeviceCtx("meta"):
        linear = Linear(IN, OUT, compute_dtype="float32", params_dtype="float32", bias=True)
    cell = adapted(linear, config)
    assert isinstance(cell, Linear) and all(parameter.is_meta for parameter in (cell.weight, *cell.lora_parameters()))
    cell.to_empty(device="CPU")
    cell.reset_parameter()
    return cell


def divided(cell):
    """Returns a cell of which two devices have a part, as far as it can tell; this one's of each parameter is all."""
    for parameter in (cell.weight, cell.bias, *cell.lora_parameters()):
        parameter.placements = (types.SimpleNamespace(is_shard=lambda: True),)
        parameter.device_mesh = types.SimpleNamespace(size=lambda axis: 2)
        parameter.to_local = lambda whole=parameter: whole
    return cell


def adapted(cell, config):
    """Returns a cell with an adapter, on a weight in 4 bits if the configuration says so."""
    from mindlora.network.registry import kind_of, nf4_type_of

    if config.quantize_base:
        cell = nf4_type_of(cell).from_dense(cell)
    return kind_of(cell, config).from_cell(cell, config)


def fill(cell):
    """Gives a cell values that depend on its parts alone."""
    from mindlora.network.quantized.nf4 import packed_parameters

    arrays = {"weight": cell.weight, "bias": cell.bias, **cell.parts()}
    for index, name in enumerate(sorted(arrays)):
        shape = (OUT, IN) if name == "weight" else arrays[name].shape
        values = np.random.default_rng(index).standard_normal(shape).astype(np.float32)
        if name == "weight" and cell.quantization:
            packed = packed_parameters(ms.Parameter(values), "weight", "")
            for tensor, parameter in packed.items():
                getattr(cell, tensor).set_data(parameter)
        else:
            arrays[name].set_data(Tensor(values))
    for parameter in (cell.weight, cell.bias):
        parameter.requires_grad = False


def differentiated(cell, x, dout, by_backward):
    """Returns the output, and the gradients of x and of what trains, by part."""
    parts = {part: parameter for part, parameter in cell.parts().items() if parameter.requires_grad}
    output = cell(x).asnumpy()
    if by_backward:
        x = ms.Parameter(x, name="x")
        gradients = backward_gradients(lambda x, *_: cell(x), [x, *parts.values()], dout)
    else:
        _, (dx, others) = ms.value_and_grad(lambda x: mint.sum(cell(x) * dout), 0, list(parts.values()))(x)
        gradients = [gradient.asnumpy() for gradient in (dx, *others)]
    return {"output": output, **dict(zip(("x", *parts), gradients))}


def main():
    """Computes with both cells of each variant."""
    pynative_cpu.install()
    from mindlora.models.lora_config import LoraConfig
    from mindlora.models.variants.registry import LORA

    rng = np.random.default_rng(1)
    x, dout = (Tensor(rng.standard_normal((2, 4, size)), ms.float32) for size in (IN, OUT))
    found = {}
    for name, fields in VARIANTS.items():
        config = LoraConfig(**{"lora_rank": RANK, "lora_alpha": 6, **fields})
        dense = nn.Dense(IN, OUT)
        cells = {"linear": made_without_values(config), "dense": adapted(dense, config)}
        if config.variant is LORA and not config.quantize_base:
            cells["sharded"] = divided(made_without_values(config))
        for where, cell in cells.items():
            fill(cell)
            cell.set_train(True)
            results = differentiated(cell, x, dout, by_backward=where != "dense")
            found.update({f"{name}/{where}/{key}": array for key, array in results.items()})
            found.update({f"{name}/{where}_name/{part}": value.name for part, value in cell.parts().items()})
    np.savez(sys.argv[1], **found)


if __name__ == "__main__":
    main()
