"""PyNativeExperts on a GroupedMLP of MindFormers' PyNative models, made without values; writes what it gives.

The argument is where to write an archive of arrays: which weights have an adapter, and what. Gradients are those of
Tensor.backward() and of value_and_grad.
"""

import sys
import types

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from tests.support import pynative_cpu
from tests.support.backward import backward_gradients

EXPERTS, HIDDEN, INNER, CHOSEN, RANK, ALPHA = 4, 8, 6, 2, 3, 6
BATCH, SEQUENCE = 2, 5
WEIGHTS = {"experts.weight1": (EXPERTS, HIDDEN, 2 * INNER), "experts.weight2": (EXPERTS, INNER, HIDDEN)}
ADAPTED = {"both": ["weight1", "weight2"], "first": ["weight1"], "second": ["weight2"]}
# With the base in 4 bits.
QUANTIZED = {"quantized": ["weight1", "weight2"], "quantized_first": ["weight1"]}


class Layer(nn.Cell):
    """A network whose only cell is the experts of a layer."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts
        for name, parameter in self.parameters_and_names():
            parameter.name = name

    def construct(self, *inputs):
        return self.experts(*inputs)


def layer_with_experts():
    """Returns a Layer as MindFormers' Trainer makes a model: without values."""
    from mindformers.pynative.transformers.moe.experts import GroupedMLP

    config = types.SimpleNamespace(
        num_moe_experts=EXPERTS,
        moe_router_topk=CHOSEN,
        moe_apply_probs_on_input=False,
        add_bias_linear=False,
        moe_ffn_hidden_size=INNER,
        hidden_size=HIDDEN,
        hidden_act="silu",
        activation_func_clamp_value=None,
        gated_linear_unit=True,
        moe_token_dispatcher_type="alltoall",
        init_method=None,
        compute_dtype=ms.float32,
        params_dtype=ms.float32,
        moe_permute_fusion=True,
    )
    with ms.DeviceCtx("meta"):
        return Layer(GroupedMLP(config))


def materialize(network):
    """Does what MindFormers' Trainer does once a model is sharded, and gives the parameters values of their names."""
    network.to_empty(device="CPU")
    for _, cell in network.cells_and_names():
        if hasattr(cell, "reset_parameter"):
            cell.reset_parameter()
    initial = {parameter.name: parameter.asnumpy().copy() for parameter in network.get_parameters()}
    for parameter in network.get_parameters():
        if "lora" in parameter.name or parameter.name in WEIGHTS and parameter.dtype == ms.float32:
            parameter.set_data(Tensor(values_of(parameter.name, parameter.shape)))
    return initial


def values_of(name, shape):
    """Returns the values of a parameter."""
    return np.random.default_rng(sum(name.encode())).standard_normal(shape).astype(np.float32)


def load_in_4_bits(network):
    """Loads weights in float into a network that has them in 4 bits."""
    from mindlora.training.pynative.checkpoints import quantize_loaded

    loaded = {name: Parameter(values_of(name, shape), name=name) for name, shape in WEIGHTS.items()}
    quantize_loaded(network, loaded)
    unloaded, _ = ms.load_param_into_net(network, loaded)
    assert all("lora" in name for name in unloaded)


def inputs():
    """Returns tokens, probabilities, chosen experts and their counts; the second expert gets no token."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((SEQUENCE, BATCH, HIDDEN)).astype(np.float32)
    probabilities = rng.random((SEQUENCE * BATCH, CHOSEN)).astype(np.float32)
    chosen = np.stack([rng.choice([0, 2, 3], CHOSEN, replace=False) for _ in range(SEQUENCE * BATCH)])
    return tokens, probabilities, chosen, np.bincount(chosen.reshape(-1), minlength=EXPERTS)


def gradients(network, trained, dout, tokens, others):
    """Returns the gradients of the tokens and of what trains: by Tensor.backward(), and by value_and_grad."""
    x = Parameter(tokens, name="x")
    backward = backward_gradients(lambda x, *_: network(x, *others), [x, *trained], dout)
    loss = ms.value_and_grad(lambda x: mint.sum(network(x, *others) * dout), 0, trained)
    _, (dx, rest) = loss(tokens)
    return backward, [gradient.asnumpy() for gradient in (dx, *rest)]


def main():
    """Computes with an adapter on each of the weights alone, and on both."""
    pynative_cpu.install()
    from mindformers.pynative.transformers.moe.experts import GroupedMLP

    from mindlora import LoraConfig, apply_lora, freeze_base, merge_and_unload
    from mindlora.network.pynative.experts import PyNativeExperts
    from mindlora.network.tree import lora_cells

    tokens, *others = (Tensor(array) for array in inputs())
    dout = Tensor(np.random.default_rng(1).standard_normal((SEQUENCE * BATCH, HIDDEN)), ms.float32)
    written = {}
    for name, leaves in {**ADAPTED, **QUANTIZED}.items():
        network = layer_with_experts()
        targets = [f"experts.{leaf}" for leaf in leaves]
        quantization = "nf4" if name in QUANTIZED else None
        apply_lora(
            network, LoraConfig(lora_rank=RANK, lora_alpha=ALPHA, target_modules=targets, quantize_base=quantization)
        )
        assert isinstance(network.experts, (GroupedMLP, PyNativeExperts))
        assert [path for path, _ in lora_cells(network)] == [f"experts.{leaf}" for leaf in leaves]
        initial = materialize(network)
        if quantization:
            load_in_4_bits(network)
        freeze_base(network)
        trained = network.trainable_params()
        backward, by_function = gradients(network, trained, dout, tokens, others)
        written |= {f"{name}/value/{p.name}": p.asnumpy().copy() for p in network.get_parameters()}
        written |= {f"{name}/initial/{p.name}": initial[p.name] for p in trained}
        for parameter, one, other in zip(["x", *(p.name for p in trained)], backward, by_function):
            written[f"{name}/backward/{parameter}"] = one
            written[f"{name}/value_and_grad/{parameter}"] = other
        written[f"{name}/output"] = network(tokens, *others).asnumpy()
        if quantization:
            continue
        network.set_train(False)
        merge_and_unload(network)
        assert type(network.experts) is GroupedMLP
        written[f"{name}/merged"] = network(tokens, *others).asnumpy()
    np.savez(sys.argv[1], **written)


if __name__ == "__main__":
    main()
