"""The network of an mcore model becomes 4-bit where the checkpoint that is to fill it is, and only there."""

from typing import Mapping, Tuple

from mindspore import nn
from mindspore.nn.utils import no_init_parameters

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.nf4 import GROUP, tensor_name
from mindlora.core.text import examples, listed
from mindlora.files.base.convert import in_hugging_face_names
from mindlora.files.base.quantized_names import quantized_weights
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.network.quantized.nf4 import NF4Dense
from mindlora.network.tree import replace_children
from mindlora.serving.mcore_network import McoreNetwork
from mindlora.serving.mcore_operators import on_cpu
from mindlora.serving.stacked_experts import WEIGHTS, Nf4StackedExperts, StackedExperts


def quantize_as(network: McoreNetwork, checkpoint: str) -> None:
    """Replaces cells of a network without values by quantized ones, in place: those whose weights are so in a file.

    Training quantizes joined cells, and this network has their parts, so quantize_exclude would name other cells.

    Raises ConfigError if of the two weights of a layer's experts only one is quantized, or an NPU does not decode a
    weight (see check_groups), and CheckpointError if the file cannot be read.
    """
    with BaseCheckpoint(checkpoint) as base:
        tensors = in_hugging_face_names(base, network.config.num_heads, network.config.n_kv_heads)
        quantized = set(quantized_weights(tensor.name for tensor in tensors))
    if not on_cpu():
        check_groups({tensor.name: tensor.shape for tensor in tensors}, checkpoint)
    replacements = {}
    with no_init_parameters():
        for path, cell in network.cells_and_names():
            if isinstance(cell, nn.Dense) and f"{path}.weight" in quantized:
                replacements[id(cell)] = NF4Dense.from_dense(cell, path)
            elif isinstance(cell, StackedExperts) and _is_quantized(path, quantized, checkpoint):
                replacements[id(cell)] = Nf4StackedExperts(cell, path)
    replace_children(network, replacements)


def check_groups(shapes: Mapping[str, Tuple[int, ...]], checkpoint: str) -> None:
    """Refuses NF4 weights with groups of fewer than 256 blocks, which operators of a CPU alone decode.

    Args:
        shapes (dict): Name -> shape of the tensors that the network gets.
        checkpoint (str): Where they are from, for the error.

    Raises:
        ConfigError: There are such weights: parts of a joined weight of the checkpoint.
    """
    smaller = []
    for weight in quantized_weights(shapes):
        rows, blocks = shapes[tensor_name(weight, "absmax")]
        if shapes[tensor_name(weight, "scales")] != (-(-rows * blocks // GROUP),):
            smaller.append(weight)
    if smaller:
        raise ConfigError(
            f"{checkpoint} joins weights in NF4, and an NPU does not decode their parts: {examples(smaller)}. Serve it "
            "on a CPU, or serve the base in float."
        )


def _is_quantized(path, quantized, checkpoint) -> bool:
    packed = [f"{path}.{name}" for name in WEIGHTS if f"{path}.{name}" in quantized]
    if len(packed) == 1:
        raise ConfigError(
            f"{checkpoint} holds {listed(packed)} in NF4, and the other weight of these experts in float: they are "
            "served in one form. Quantize the base again with --exclude for both weights, or for none."
        )
    return bool(packed)
