"""mindlora's cells of mcore models for a CPU, divided among devices as MindFormers divides those whose place they take.

What such a cell computes is one operator to MindSpore (Morph), with layouts; in it each device computes of what it has.
"""

from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.tensor_parallel.layers import VocabParallelEmbedding
from mindspore import mint, nn, ops
from mindspore.ops.operations import Morph

from mindlora.network.cells.routed_experts import RoutedExperts
from mindlora.training.model import mcore_cpu_cells
from mindlora.training.model.mcore_cpu_cells import CpuFlashAttention, CpuFusedRMSNorm, CpuRotary, Pieces

# Axes of [sequence, batch, channels], and of [sequence, batch, heads, channels of a head].
_TOKENS, _HEADS, _ANGLES = ("cp", "dp", "None"), ("cp", "dp", "tp", "None"), ("cp", "None", "None", "None")


def use_divided_cpu_cells(network):
    """Does what use_mcore_cpu_cells does, to a network in the semi-automatic mode."""
    mint.nn.functional.embedding = _lookup
    lookups = [(cell, cell.embedding_morph) for cell in _cells_of(network) if isinstance(cell, VocabParallelEmbedding)]
    mcore_cpu_cells.use_mcore_cpu_cells(network)
    for cell, lookup in lookups:
        cell.embedding_morph = lookup
    for cell in _cells_of(network):
        for name, child in list(cell._cells.items()):
            if isinstance(child, CpuFlashAttention):
                cell._cells[name] = DividedAttention(child)
            elif isinstance(child, CpuRotary):
                cell._cells[name] = DividedRotary(child)
            elif isinstance(child, Pieces):
                cell._cells[name] = DividedPieces()
        if isinstance(cell, CpuFusedRMSNorm):
            cell.fused = DividedNorm(cell)
        elif isinstance(cell, RoutedExperts):
            cell.__class__, cell.gather = DividedExperts, ops.AllGather()
            cell.make_morph()


def _cells_of(network):
    return [cell for _, cell in network.cells_and_names()]


def _lookup(ids, table):
    """mint's embedding, whose operator a CPU lacks."""
    return ops.gather(table, ids, 0)


def _divided(function, inputs, output, shape=None):
    """Returns a function of tensors as an operator, of which each device computes a part."""
    operator = Morph(function, shape or _first, _first).add_prim_attr("self_define_shard", True)
    return operator.shard(in_strategy=tuple(layout(*axes) for axes in inputs), out_strategy=(layout(*output),))


def _first(first, *_):
    return first


class DividedNorm(nn.Cell):
    """RmsNorm in a FusedRMSNorm."""

    def __init__(self, cell):
        super().__init__(auto_prefix=False)
        self.norm = cell.fused
        axes = _TOKENS if len(cell.norm.attrs["in_layout"][0]["tensor_map"]) == 3 else _HEADS
        self.of_all_ranks = _divided(self.of_rank, (axes, ("None",), ("None",)), axes)

    def construct(self, x, weight, eps):
        return self.of_all_ranks(x, weight, eps)

    def of_rank(self, x, weight, eps):
        return self.norm(x, weight, eps)


class DividedAttention(nn.Cell):
    """CpuFlashAttention."""

    def __init__(self, attention):
        super().__init__(auto_prefix=False)
        self.attention = attention
        inputs = _HEADS, _HEADS, _HEADS, ("dp", "None", "cp", "None")
        self.of_all_ranks = _divided(self.of_rank, inputs, ("cp", "dp", "tp"), _joined_heads)

    def construct(self, query, key, value, attention_mask):
        return self.of_all_ranks(query, key, value, attention_mask)

    def of_rank(self, query, key, value, attention_mask):
        return self.attention(query, key, value, attention_mask)


def _joined_heads(query, key, value, attention_mask):
    return [query[0], query[1], query[2] * value[3]]


class DividedRotary(nn.Cell):
    """CpuRotary."""

    def __init__(self, rotary):
        super().__init__(auto_prefix=False)
        self.rotary = rotary
        self.of_all_ranks = _divided(self.of_rank, (_HEADS, _ANGLES), _HEADS)

    def construct(self, x, freqs):
        return self.of_all_ranks(x, freqs[0] * freqs[1])

    def of_rank(self, x, angles):
        return self.rotary(x, (angles, 1.0))


class DividedPieces(nn.Cell):
    """Pieces of [sequence, batch, heads, channels of a head] along the last axis, which is whole."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.slice = ops.StridedSlice().shard((layout.to_tuple_strategy(layout(*_HEADS)),))

    def construct(self, x, sizes, dim=0):
        pieces, begin = (), 0
        for size in sizes:
            pieces += (self.slice(x, (0, 0, 0, begin), x.shape[:3] + (begin + size,), (1, 1, 1, 1)),)
            begin += size
        return pieces


class DividedExperts(RoutedExperts):
    """RoutedExperts whose experts are divided among all devices: weights, not tokens, go from one to another.

    CPUs have no AllToAll, by which MindFormers sends each token to the device of its expert.
    """

    of_all_experts = RoutedExperts._forward

    def _forward(self, tokens, probs, routing_map, w1, a1, b1, w2, a2, b2, num_tokens_per_expert=None):
        w1, a1, b1 = self.gather(w1), self.gather(a1), self.gather(b1)
        w2, a2, b2 = self.gather(w2), self.gather(a2), self.gather(b2)
        return self.of_all_experts(tokens, probs, routing_map, w1, a1, b1, w2, a2, b2, num_tokens_per_expert)
