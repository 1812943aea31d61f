"""The network of an mcore model becomes 4-bit where the checkpoint that is to fill it is, and only there."""

from mindspore import nn
from mindspore.nn.utils import no_init_parameters

from mindlora.base.convert import in_hugging_face_names
from mindlora.base.quantized_names import quantized_weights
from mindlora.base.reader import BaseCheckpoint
from mindlora.common.text import listed
from mindlora.errors import ConfigError
from mindlora.nn.nf4 import NF4Dense
from mindlora.nn.tree import replace_children
from mindlora.serving.mcore_network import McoreNetwork
from mindlora.serving.stacked_experts import WEIGHTS, Nf4StackedExperts, StackedExperts


def quantize_as(network: McoreNetwork, checkpoint: str) -> None:
    """Replaces cells of a network without values by quantized ones, in place: those whose weights are so in a file.

    Training quantizes joined cells, and this network has their parts, so quantize_exclude would name other cells.

    Raises ConfigError if of the two weights of a layer's experts only one is quantized, and CheckpointError if the file
    cannot be read.
    """
    with BaseCheckpoint(checkpoint) as base:
        tensors = in_hugging_face_names(base, network.config.num_heads, network.config.n_kv_heads)
        quantized = set(quantized_weights(tensor.name for tensor in tensors))
    replacements = {}
    with no_init_parameters():
        for path, cell in network.cells_and_names():
            if isinstance(cell, nn.Dense) and f"{path}.weight" in quantized:
                replacements[id(cell)] = NF4Dense.from_dense(cell, path)
            elif isinstance(cell, StackedExperts) and _is_quantized(path, quantized, checkpoint):
                replacements[id(cell)] = Nf4StackedExperts(cell, path)
    replace_children(network, replacements)


def _is_quantized(path, quantized, checkpoint) -> bool:
    packed = [f"{path}.{name}" for name in WEIGHTS if f"{path}.{name}" in quantized]
    if len(packed) == 1:
        raise ConfigError(
            f"{checkpoint} holds {listed(packed)} in NF4, and the other weight of these experts in float: they are "
            "served in one form. Quantize the base again with --exclude for both weights, or for none."
        )
    return bool(packed)
