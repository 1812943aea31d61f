"""Stand-ins for the kernels that MindFormers' mcore models need and a CPU lacks, in plain operators.

``install()`` puts them where MindFormers' modules look the operators up. They are for tests on a CPU alone: nothing of
mindlora imports this module, and on Ascend MindFormers runs its own operators.
"""

import importlib

from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype

_TRAINING_GRAPH = "mindformers.parallel_core.training_graph"


class StandIn(nn.Cell):
    """A cell in the place of a primitive, with the methods of one that MindFormers calls while it builds a network."""

    def shard(self, *_: object, **__: object) -> "StandIn":
        return self

    def add_prim_attr(self, *_: object, **__: object) -> "StandIn":
        return self


class RmsNorm(StandIn):
    """x / sqrt(mean(x^2) + eps) * gamma, over the last axis; returns it and 1 / sqrt(mean(x^2) + eps)."""

    def __init__(self, epsilon: float = 1e-6):
        super().__init__()
        self.epsilon = epsilon

    def construct(self, x: Tensor, gamma: Tensor):
        factor = ops.rsqrt(ops.ReduceMean(keep_dims=True)(ops.square(x), -1) + self.epsilon)
        return x * factor * gamma, factor


class SplitWithSize(StandIn):
    """The pieces of x of the given sizes along an axis (dim)."""

    def construct(self, x: Tensor, sizes, dim=0):
        pieces, begin = (), 0
        for size in sizes:
            pieces += (ops.narrow(x, dim, begin, size),)
            begin += size
        return pieces


class Outer(StandIn):
    """x y^T of two vectors."""

    def construct(self, x: Tensor, y: Tensor):
        return ops.expand_dims(x, 1) * ops.expand_dims(y, 0)


class FlashAttentionScore(StandIn):
    """softmax(scale q k^T, masked where the mask is not 0) v, computed in float32; input_layout BNSD alone."""

    def __init__(self, head_num: int, scale_value: float = 1.0, input_layout: str = "BNSD", **_: object):
        super().__init__()
        assert input_layout == "BNSD", input_layout
        self.head_num, self.scale_value = head_num, scale_value
        self.softmax = ops.Softmax()

    def construct(self, q, k, v, alibi=None, drop=None, padding=None, mask=None, prefix=None, q_len=None, k_len=None):
        dtype, heads, kv_heads = q.dtype, q.shape[1], k.shape[1]
        q, k, v = (ops.cast(x, mstype.float32) for x in (q, k, v))
        k, v = self._repeat(k, heads // kv_heads), self._repeat(v, heads // kv_heads)
        scores = ops.matmul(q, k.swapaxes(2, 3)) * self.scale_value
        if mask is not None:
            scores = scores + ops.cast(mask, mstype.float32) * -1e9
        return None, None, None, ops.cast(ops.matmul(self.softmax(scores), v), dtype)

    def _repeat(self, x, times):
        batch, heads, tokens, dim = x.shape
        return ops.tile(x.expand_dims(2), (1, 1, times, 1, 1)).reshape(batch, heads * times, tokens, dim)


# Module of MindFormers, where it looks an operator up, and what stands in for it.
_PLACES = (
    ("transformer.norm", "P.RmsNorm", RmsNorm),
    ("transformer.mlp", "SplitWithSize", SplitWithSize),
    ("transformer.attention", "aclnn_ops.SplitWithSize", SplitWithSize),
    ("transformer.flash_attention", "FlashAttentionScore", FlashAttentionScore),
    ("base_models.common.embeddings.rotary_pos_embedding", "Outer", Outer),
)


def install(setter=setattr) -> None:
    """Puts the stand-ins where MindFormers' mcore models look the operators up, from now on.

    Args:
        setter (callable): Sets an attribute, as setattr does; monkeypatch.setattr undoes it after a test.
    """
    for module, place, stand_in in _PLACES:
        owner = importlib.import_module(f"{_TRAINING_GRAPH}.{module}")
        *path, name = place.split(".")
        for part in path:
            owner = getattr(owner, part)
        setter(owner, name, stand_in)
