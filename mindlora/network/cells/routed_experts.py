"""The forward of MindFormers' FFNGroupedGEMM with adapters on its experts' weights, or with 4-bit weights."""

import sys
from typing import Dict, Iterable, Mapping, Tuple

from mindspore import Tensor, nn, ops
from mindspore.ops.operations import Morph

from mindlora.network.cells.cell import LoRACell, carry_settings
from mindlora.network.cells.experts import FFN_MODULE, ExpertWeight
from mindlora.network.cells.linear_base import is_sharded
from mindlora.network.cells.stacked import StackedLoRAExpertWeight
from mindlora.network.pynative.experts import (
    LEAVES,
    LoRAPyNativeExpertWeight,
    PyNativeExperts,
    PyNativeExpertWeight,
    StackedLoRAPyNativeExpertWeight,
    grouped_mlp_types,
)

# Cells of weights that PyNativeExperts holds: each comes after its experts, under the name of the parameter.
_HELD = (PyNativeExpertWeight, LoRAPyNativeExpertWeight, StackedLoRAPyNativeExpertWeight)


class RoutedExperts(nn.Cell):
    """FFNGroupedGEMM with adapters on its weights, or with 4-bit weights (LoRAExpertWeight, NF4ExpertWeight):

    y = sum over the experts e of a token of p_e swiglu(x W1_e) W2_e. The tokens are sent to the experts' devices and
    back by MindFormers' own dispatcher.

    Inputs:
        - **tokens** (Tensor) - Shape [devices, tokens, hidden].
        - **probs** (Tensor) - Shape [devices, tokens, experts of a token].
        - **routing_map** (Tensor) - Of the same shape; the experts of each token.

    Outputs:
        Tensor of the shape and dtype of tokens.
    """

    def __init__(self, cell: nn.Cell, weights: Mapping[str, nn.Cell]):
        super().__init__()
        self._adopted = (cell,)
        # Straight into _cells: assigning an attribute would rename the parameters of the frozen base.
        self._cells.update(weights)
        self.token_dispatcher = cell.token_dispatcher
        self.swiglu = cell.swiglu
        self.num_tokens_per_expert = cell.num_tokens_per_expert
        self.hidden_size = cell.hidden_size
        self.inner_size = cell.moe_ffn_hidden_size
        self.slices = cell.moe_token_dispatcher_type == "alltoall_deredundency"
        if self.slices:
            self.stride_slice = cell.stride_slice
        self.cast = ops.Cast()
        self.reshape = ops.Reshape()
        self.is_sharded = is_sharded(cell)
        self.make_morph()
        carry_settings(cell, self)

    def make_morph(self) -> None:
        """Builds the Morph that runs this cell's experts."""
        self.morphed_forward = Morph(self._forward, _of_tokens, _of_tokens)
        self.morphed_forward.add_prim_attr("self_define_shard", True)
        if self.is_sharded:
            self._shard()

    def _shard(self):
        layout = sys.modules[FFN_MODULE].layout
        tokens = layout("dp_cp", "None", "None")
        # W is [experts * in, out]; A and B have an axis of experts. Without an adapter, W stands in for A and B.
        of_weight = layout("ep", "None")
        of_pair = layout("ep", "None", "None")
        operands = []
        for leaf in LEAVES:
            half = of_pair if isinstance(self._cells[leaf], LoRACell) else of_weight
            operands += [of_weight, half, half]
        self.morphed_forward.shard(
            in_strategy=(tokens, tokens, tokens, *operands, layout("None")), out_strategy=(tokens,)
        )

    def construct(self, tokens: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        shape = tokens.shape
        dtype = tokens.dtype
        if self.slices:
            tokens = self.stride_slice(tokens, (0, 0, 0), shape, (1, 1, 1))
        tokens = self.cast(tokens, self.weight1.dtype)
        w1, a1, b1 = self.weight1.operands(tokens)
        w2, a2, b2 = self.weight2.operands(tokens)
        y = self.morphed_forward(tokens, probs, routing_map, w1, a1, b1, w2, a2, b2, self.num_tokens_per_expert)
        if self.slices:
            y = self.stride_slice(y, (0, 0, 0), shape, (1, 1, 1))
        return self.cast(y, dtype)

    def _forward(self, tokens, probs, routing_map, w1, a1, b1, w2, a2, b2, num_tokens_per_expert=None):
        """The function of the Morph, which takes each tensor as a separate input and no other Parameter."""
        x, groups, context = self.token_dispatcher.token_permutation(tokens, probs, routing_map, num_tokens_per_expert)
        x = self.weight1(self.reshape(x, (-1, self.hidden_size)), w1, a1, b1, groups)
        x = self.reshape(self.swiglu(x, -1), (-1, self.inner_size))
        return self.token_dispatcher.token_unpermutation(self.weight2(x, w2, a2, b2, groups), context)

    def sharded_state_dict(self) -> dict:
        """Returns the state dict of the replaced cell that MindFormers' Muon optimizer reads."""
        return self._adopted[0].sharded_state_dict()

    def plain_cell(self) -> nn.Cell:
        """Returns the replaced cell, with its weights."""
        (cell,) = self._adopted
        carry_settings(self, cell)
        return cell


class StackedRoutedExperts(RoutedExperts):
    """RoutedExperts with K adapters on its weights (StackedLoRAExpertWeight), each with an equal share of tokens.

    K columns beside a token's own tell its experts which adapter it belongs to.
    """

    def __init__(self, cell: nn.Cell, weights: Mapping[str, nn.Cell]):
        super().__init__(cell, weights)
        self.stacked = tuple(isinstance(weights[leaf], StackedLoRAExpertWeight) for leaf in LEAVES)
        self.adapters = max(getattr(weight, "adapters", 0) for weight in weights.values())

    def _forward(self, tokens, probs, routing_map, w1, a1, b1, w2, a2, b2, num_tokens_per_expert=None):
        count = tokens.shape[1]
        adapter = ops.arange(count).expand_dims(1) // (count // self.adapters)
        owners = self.cast(adapter == ops.arange(self.adapters).expand_dims(0), tokens.dtype).expand_dims(0)
        wide, groups, context = self.token_dispatcher.token_permutation(
            ops.concat((tokens, owners), 2), probs, routing_map, num_tokens_per_expert
        )
        wide = self.reshape(wide, (-1, self.hidden_size + self.adapters))
        x = ops.narrow(wide, 1, 0, self.hidden_size)
        owners = ops.stop_gradient(ops.narrow(wide, 1, self.hidden_size, self.adapters))
        of_first = (owners,) if self.stacked[0] else ()
        of_second = (owners,) if self.stacked[1] else ()
        x = self.weight1(x, w1, a1, b1, groups, *of_first)
        x = self.reshape(self.swiglu(x, -1), (-1, self.inner_size))
        return self.token_dispatcher.token_unpermutation(self.weight2(x, w2, a2, b2, groups, *of_second), context)

    def plain_cell(self) -> RoutedExperts:
        """Returns routed experts with the same weights, without the adapters, that can take another adapter."""
        (holder,) = self._adopted
        plain = RoutedExperts(holder, {leaf: ExpertWeight(holder, leaf) for leaf in LEAVES})
        plain.token_dispatcher, plain.swiglu = self.token_dispatcher, self.swiglu
        carry_settings(self, plain)
        return plain


def _of_tokens(*inputs: object) -> object:
    return inputs[0]


def cells_and_weights(modules: Mapping[str, nn.Cell]) -> Dict[str, nn.Cell]:
    """Returns path -> cell of all ``modules`` of a network, and ExpertWeights of experts' weights after the experts."""
    cells: Dict[str, nn.Cell] = {}
    for path, cell in modules.items():
        if isinstance(cell, _HELD):
            continue
        cells[path] = cell
        for leaf, weight in _weights_of(cell).items():
            cells[f"{path}.{leaf}" if path else leaf] = weight
    return cells


def _weights_of(cell: nn.Cell) -> Mapping[str, nn.Cell]:
    """Returns leaf -> the cell of each weight, if a cell is routed experts without child cells of that name."""
    ffn = sys.modules.get(FFN_MODULE)
    if ffn and isinstance(cell, ffn.FFNGroupedGEMM):
        return {leaf: ExpertWeight(cell, leaf) for leaf in LEAVES}
    if isinstance(cell, PyNativeExperts):
        return cell.weights()
    if isinstance(cell, grouped_mlp_types()):
        return {leaf: PyNativeExpertWeight(cell, leaf) for leaf in LEAVES}
    return {}


def holders_with(modules: Mapping[str, nn.Cell], replaced: Iterable[Tuple[nn.Cell, nn.Cell]]) -> Dict[int, nn.Cell]:
    """Returns id of FFNGroupedGEMM or GroupedMLP -> its replacement, for pairs (base cell, its replacement).

    Weights that are already in a RoutedExperts are ``modules`` of the network and need none.
    """
    present = set(map(id, modules.values()))
    holders: Dict[int, nn.Cell] = {}
    weights: Dict[int, Dict[str, nn.Cell]] = {}
    for base, cell in replaced:
        if isinstance(base, ExpertWeight) and id(base) not in present:
            holders[id(base.holder)] = base.holder
            weights.setdefault(id(base.holder), {})[base.leaf] = cell
    replacements: Dict[int, nn.Cell] = {}
    for key, holder in holders.items():
        if isinstance(holder, grouped_mlp_types()):
            replacements[key] = PyNativeExperts.of(holder, weights[key])
        else:
            cells = {leaf: weights[key].get(leaf) or ExpertWeight(holder, leaf) for leaf in LEAVES}
            stacked = any(isinstance(cell, StackedLoRAExpertWeight) for cell in cells.values())
            replacements[key] = (StackedRoutedExperts if stacked else RoutedExperts)(holder, cells)
    return replacements


def plain_holders(network: nn.Cell) -> Dict[int, nn.Cell]:
    """Returns id of each RoutedExperts or PyNativeExperts without a 4-bit weight -> the cell that it replaced."""
    holders: Dict[int, nn.Cell] = {}
    for _, cell in network.cells_and_names():
        quantized = any(getattr(weight, "quantization", None) for weight in cell.cells())
        if isinstance(cell, (RoutedExperts, PyNativeExperts)) and not quantized:
            holders[id(cell)] = cell.plain_cell()
    return holders
