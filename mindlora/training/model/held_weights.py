"""A base that stays in 16 bits during training on a CPU, where everything else is computed in float32."""

from typing import Any, List, Optional, Tuple

import mindspore as ms
from mindformers.models.llama.llama_layer import LlamaEmbedding, LlamaRMSNorm
from mindformers.modules.layers import Linear
from mindformers.parallel_core.training_graph.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.parallel_core.training_graph.transformer.norm import FusedRMSNorm
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.core.errors import ConfigError
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.dense import LoRADense
from mindlora.network.cells.embedding import AroundEmbedding, LoRAEmbedding
from mindlora.network.cells.experts import ExpertWeight, LoRAExpertWeight
from mindlora.network.cells.linear_base import LinearBase
from mindlora.network.cells.parallel_linear import ParallelBase
from mindlora.network.cells.routed_experts import RoutedExperts
from mindlora.network.cells.stacked import StackedLoRADense, StackedLoRAExpertWeight
from mindlora.network.pynative.experts import LEAVES
from mindlora.network.tree import replace_children
from mindlora.ops.backend import multiplies_bfloat16
from mindlora.ops.frozen_linear import HELD_DTYPES, FrozenGather, FrozenRows
from mindlora.training.log import logger

_ADVICE = "Set params_dtype of an mcore model, else param_init_type and embedding_init_type, to float32."
# These cells widen their weights themselves: vectors, and a router's few rows.
_WIDENING = (LlamaRMSNorm, FusedRMSNorm, TopKRouter)
# These cells multiply by one frozen weight, with or without adapters.
_MULTIPLYING = (LoRADense, StackedLoRADense, ExpertWeight, LoRAExpertWeight, StackedLoRAExpertWeight)


class HeldLinear(Linear):
    """MindFormers' Linear with a frozen 16-bit weight."""

    def construct(self, x: Tensor, group_list: Any = None) -> Tensor:
        y = self.held.linear(self.held.tokens(x), (self.weight,), self.bias if self.has_bias else None)
        if self.activation_flag:
            y = self.activation(y)
        return self.held.like(y, x)


class HeldColumnParallelLinear(ColumnParallelLinear):
    """MindFormers' ColumnParallelLinear with a frozen 16-bit weight, which an output layer may get as an argument."""

    def construct(self, input_: Tensor, weight: Optional[Tensor] = None) -> Tuple[Tensor, Optional[Tensor]]:
        weight = self.weight if weight is None else weight
        y = self.held.linear(self.held.tokens(input_), (weight,), self.bias)
        return self.held.like(y, input_), None if self.held.has_bias else self.bias


class HeldRowParallelLinear(RowParallelLinear):
    """MindFormers' RowParallelLinear with a frozen 16-bit weight."""

    construct = HeldColumnParallelLinear.construct


_HELD = {
    Linear: (HeldLinear, LinearBase),
    ColumnParallelLinear: (HeldColumnParallelLinear, ParallelBase),
    RowParallelLinear: (HeldRowParallelLinear, ParallelBase),
}


def hold_weights(network: nn.Cell, product_dtype: str) -> None:
    """Makes a network with adapters multiply directly by frozen 16-bit weights, in place, on a CPU.

    Linear cells use FrozenLinear, routed experts FrozenExperts, and embeddings FrozenRows; norms and routers widen
    their small weights, and trainable parameters of the base are widened permanently. The inputs and outputs of each
    cell are float32, and so are A and B. A network in float32 is left unchanged. The cells that adapters replaced hold
    16-bit weights too, for a reference without the adapters.

    Args:
        network (nn.Cell): A MindFormers model with adapters, with its trainable parameters already set.
        product_dtype (str): float32 or bfloat16, to which linear cells round their operands: see FrozenLinear.

    Raises:
        ConfigError: A frozen 16-bit parameter belongs to a cell that does not support it; or product_dtype does not go
            with the weights.
        BackendError: The library of mindlora's CPU operators is missing.
    """
    if ms.get_context("device_target") != "CPU":
        return
    rounds = product_dtype == "bfloat16"
    _separate_experts(network)
    held = [_hold(cell, path, rounds) for path, cell in list(network.cells_and_names())]
    dtypes = {dtype for dtype in held if dtype is not None}
    if rounds and dtypes != {mstype.bfloat16}:
        raise ConfigError(
            f"pet_config.product_dtype is bfloat16, and linear cells hold {_listed(dtypes)}: hold the base in bfloat16 "
            "(params_dtype of an mcore model, else param_init_type), or leave product_dtype out."
        )
    if rounds and not multiplies_bfloat16():
        logger.warning(
            "pet_config.product_dtype is bfloat16, but this processor has no instructions that multiply bfloat16 "
            "(AVX512_BF16, AMX): products are rounded, and take as long as without it. Leave it out."
        )
    if dtypes:
        logger.info(
            "The base stays in %s: linear cells multiply by its weights as they are, with products in %s; all else is "
            "computed in float32.",
            _listed(dtypes),
            product_dtype,
        )


def release_weights(network: nn.Cell) -> None:
    """Turns hold_weights' linear cells without an adapter back into MindFormers' own, in place, to take adapters."""
    own = {held: kind for kind, (held, _) in _HELD.items()}
    for _, cell in network.cells_and_names():
        cell.__class__ = own.get(type(cell), type(cell))


def _separate_experts(network):
    """Replaces MindFormers' experts with 16-bit weights and no adapter by RoutedExperts."""
    separate = {}
    for _, cell in network.cells_and_names():
        if isinstance(cell, FFNGroupedGEMM) and cell.weight1.dtype in HELD_DTYPES:
            separate[id(cell)] = RoutedExperts(cell, {leaf: ExpertWeight(cell, leaf) for leaf in LEAVES})
    replace_children(network, separate)


def _hold(cell, path, rounds):
    """Makes a cell use its own frozen 16-bit parameters directly; returns the dtype of its weight, or None."""
    if isinstance(cell, AroundEmbedding) and cell.dtype in HELD_DTYPES:
        cell.dtype = mstype.float32
    own = _parameters_of_base(cell)
    for parameter in own:
        if parameter.requires_grad and parameter.dtype in HELD_DTYPES:
            parameter.set_dtype(mstype.float32)
    narrow = [parameter for parameter in own if parameter.dtype in HELD_DTYPES]
    # An integer product uses the scales unchanged.
    if not narrow or isinstance(cell, _WIDENING) or getattr(cell, "in_integers", False):
        return None
    dtype = narrow[0].dtype
    if isinstance(cell, _MULTIPLYING):
        if cell.weight.dtype not in HELD_DTYPES:
            return None
        cell.hold_base(rounds)
        if isinstance(cell, LoRADense):
            _hold_linear(cell.base_cell, cell.base)
    elif type(cell) in _HELD:
        _, base = _HELD[type(cell)]
        _hold_linear(cell, base(cell))
        cell.held.hold(rounds)
    elif isinstance(cell, LoRAEmbedding):
        cell.hold_base()
        _hold_table(cell.base_cell)
        return None
    elif isinstance(cell, (LlamaEmbedding, VocabParallelEmbedding)):
        _hold_table(cell)
        return None
    else:
        raise ConfigError(
            f"{narrow[0].name} is in {dtype}, and a {type(cell).__name__} ({path}) cannot compute with it on a CPU. "
            f"{_ADVICE}"
        )
    return dtype


def _parameters_of_base(cell) -> List[Parameter]:
    """Returns a cell's own parameters except its adapter's."""
    own = [parameter for _, parameter in cell.parameters_and_names(expand=False)]
    if not isinstance(cell, LoRACell):
        return own
    adapter = {id(parameter) for parameter in (*cell.lora_parameters(), *cell.shared_parts().values())}
    return [parameter for parameter in own if id(parameter) not in adapter]


def _hold_linear(cell, base):
    """Makes a MindFormers linear cell without an adapter compute with ``base``."""
    if type(cell) in _HELD:
        # Changing a cell's class keeps its parameters and settings.
        cell.__class__, _ = _HELD[type(cell)]
    cell.held = base


def _hold_table(cell):
    """Makes a MindFormers embedding widen the rows that it looks up."""
    if isinstance(cell, VocabParallelEmbedding):
        cell.embedding_morph = FrozenRows()
    else:
        cell.gather = FrozenGather()


def _listed(dtypes):
    return " and ".join(sorted(str(dtype).lower() for dtype in dtypes)) or "float32 or 4-bit weights"
