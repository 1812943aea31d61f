"""aLoRA: finds, at the embedding, the tokens of a batch on which adapters act, and passes them to the cells behind.

A linear cell gets vectors, which do not show their tokens. So a cell around the input embedding
finds the invocation tokens and writes for each token whether the adapters act on it, into one parameter that the linear
cells read. It is written whenever the network runs, in the same graph: in each micro-batch, in evaluation, and in
generation. As it describes one batch and is not state of the run, it is hidden from MindSpore: it is neither
counted nor saved, and no checkpoint needs to hold it.
"""

from typing import Dict, Mapping, Optional, Sequence

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.ops.primitive import constexpr

from mindlora.core.errors import ConfigError
from mindlora.network.cells.cell import LoRACell
from mindlora.network.cells.embedding import AroundEmbedding, only_embedding, parallel_embedding_types
from mindlora.network.cells.linear_base import pynative_linear_types

# The examples of packed rows, and each token's example.


def segment_numbers(tokens: Tensor, boundary: int) -> Tensor:
    """Returns the number, from 1, of each token's example within the row: int32 [rows, N], like ``tokens``.

    Each example begins with the token ``boundary``: ``segment[i] = sum_{k <= i} (tokens[k] == boundary)``.
    """
    # mint's cumulative sum has no CPU kernel.
    return ops.CumSum()((tokens == boundary).astype(mstype.int32), 1)


# The largest number of tokens in a batch: a parameter has one size for all graphs, and this is a megabyte.
CAPACITY = 2**18
FIELD = "alora_invocation_tokens"


@constexpr
def _tokens_left(tokens):
    if tokens > CAPACITY:
        raise ConfigError(
            f"A batch has {tokens:,} tokens, but a network with {FIELD} takes at most {CAPACITY:,} at once. Lower "
            "runner_config.batch_size, and raise gradient_accumulation_steps instead."
        )
    return CAPACITY - tokens


class InvocationMask(nn.Cell):
    r"""y[b, i] = 1 if i >= s_b, else 0, where s_b is the last place in row b at which the invocation tokens begin.

    A row without them is 0 throughout, as in PEFT. In packed rows, each example has its own s, and none if the
    tokens are not in it.

    Args:
        invocation (sequence of int): The invocation tokens.
        boundary (int): The token with which each example of packed rows begins. Default: None, rows are not packed.

    Inputs:
        - **ids** (Tensor) - int32 or int64 [rows, N].

    Outputs:
        Tensor, float32 [rows, N].

    Source: Greenewald et al., Activated LoRA: Fine-tuned LLMs for Intrinsics, 2025.
    """

    def __init__(self, invocation: Sequence[int], boundary: Optional[int] = None):
        super().__init__()
        self.invocation = tuple(invocation)
        self.boundary = boundary
        self.count = ops.CumSum()
        self.largest = ops.ReduceMax(keep_dims=True)

    def construct(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        starts = length - len(self.invocation) + 1
        if starts < 1:
            return ops.zeros(ids.shape, mstype.float32)
        found = ids[:, :starts] == self.invocation[0]
        for offset in range(1, len(self.invocation)):
            found = ops.logical_and(found, ids[:, offset : offset + starts] == self.invocation[offset])
        segments = None
        if self.boundary is not None:
            segments = segment_numbers(ids, self.boundary)
            found = ops.logical_and(found, segments[:, :starts] == segments[:, length - starts :])
        # Positions from 1, and 0 for none; float32, for which a CPU has a maximum too.
        positions = self.count(ops.ones((1, length), mstype.float32), 1)
        ends = ops.zeros((ids.shape[0], length - starts), mstype.float32)
        candidates = ops.concat((found.astype(mstype.float32), ends), 1) * positions
        if segments is not None:
            same = (segments.expand_dims(2) == segments.expand_dims(1)).astype(mstype.float32)
            last = self.largest(same * candidates.expand_dims(1), 2).squeeze(2)
        else:
            last = self.largest(candidates, 1)
        return ops.logical_and(positions >= last, last > 0).astype(mstype.float32)


class InvocationMarker(AroundEmbedding):
    """An input embedding that also tells the linear cells behind it the tokens on which adapters act (InvocationMask).

    Args:
        embedding (nn.Cell): The embedding.
        invocation (sequence of int): The invocation tokens.
        active (Parameter): float32 [CAPACITY]; its first elements are the tokens in the linear cells' order: one row
            after the other, or in an mcore model the first token of all rows, then the second.

    Inputs:
        - **ids** (Tensor) - int32 or int64 [rows, N].

    Outputs:
        Tensor, the embedding's output.
    """

    def __init__(self, embedding: nn.Cell, invocation: Sequence[int], active: Parameter):
        super().__init__(embedding)
        self.mask = InvocationMask(invocation)
        # Past nn.Cell, which would list the parameter among those of the network.
        self.__dict__["active"] = active
        self.tokens_first = isinstance(embedding, parallel_embedding_types())

    def construct(self, ids: Tensor) -> Tensor:
        active = self.mask(ids)
        if self.tokens_first:
            active = active.transpose((1, 0))
        active = active.reshape((-1,))
        rest = ops.zeros((_tokens_left(active.shape[0]),), mstype.float32)
        written = ops.assign(self.active, ops.concat((active, rest)))
        return ops.depend(self.embedding(ids), written)


class InvocationHook:
    """InvocationMarker as a hook before a PyNative model's embedding, which MindFormers finds by its class.

    The linear cells of such a model get tokens in the order [N, rows].

    Args:
        invocation (sequence of int): The invocation tokens.
        active (Parameter): As in InvocationMarker.
    """

    def __init__(self, invocation: Sequence[int], active: Parameter):
        self.mask = InvocationMask(invocation)
        self.active = active

    def __call__(self, _: nn.Cell, inputs: Sequence[Tensor]) -> None:
        active = ops.transpose(self.mask(inputs[0]), (1, 0)).reshape((-1,))
        rest = ops.zeros((_tokens_left(active.shape[0]),), mstype.float32)
        ops.assign(self.active, ops.concat((active, rest)))


def invocation_marker(network: nn.Cell, cells: Mapping[str, LoRACell]) -> Dict[int, nn.Cell]:
    """Makes the new ``cells`` with adapters, by path, act from their invocation tokens on, if they have any.

    Returns the cells to replace: id of the network's input embedding -> InvocationMarker, or an empty dict.

    Raises UnsupportedCellError unless the network has exactly one input embedding.
    """
    invocations = {cell.invocation_tokens for cell in cells.values()} - {()}
    if not invocations:
        return {}
    embedding = only_embedding(network, FIELD, "finds its tokens at")
    (invocation,) = invocations
    active = Parameter(Tensor(np.zeros(CAPACITY, np.float32)), name="active_tokens", requires_grad=False)
    for cell in cells.values():
        cell.low_rank.read(active)
    if any(isinstance(cell.base_cell, pynative_linear_types()) for cell in cells.values()):
        embedding.invocation_hook = InvocationHook(invocation, active)
        embedding.register_forward_pre_hook(embedding.invocation_hook)
        return {}
    return {id(embedding): InvocationMarker(embedding, invocation, active)}


def pack_invocations(network: nn.Cell, boundary: int) -> None:
    """Makes a network treat its rows as packed: each example begins with the token ``boundary``."""
    for _, cell in network.cells_and_names():
        marker = cell if isinstance(cell, InvocationMarker) else getattr(cell, "invocation_hook", None)
        if marker is not None:
            marker.mask.boundary = boundary
