"""Stand-ins for the kernels of MindFormers' mixture of experts that a CPU lacks, dense and in plain operators.

``install()`` puts them, and those of mcore_cpu, where MindFormers' modules and mindlora's cell look the operators up.
They are for tests on a CPU alone: nothing of mindlora imports this module, and on Ascend the operators themselves run.
"""

import contextlib
import importlib
from typing import Iterator

import pytest
from mindspore import Tensor, ops
from mindspore.common import dtype as mstype

from tests.support import mcore_cpu

_LATENT = "mindformers.parallel_core.training_graph.transformer.multi_latent_attention"
_MOE = "mindformers.parallel_core.training_graph.transformer.moe"


class StandIn(mcore_cpu.StandIn):
    """A stand-in for a primitive whose recomputation MindFormers switches on or off."""

    def recompute(self, *_: object, **__: object) -> "StandIn":
        return self


class GroupedMatmul(StandIn):
    """x_e W_e for the rows x_e of each group; the group list holds where each group ends."""

    def __init__(self, split_item: int, group_type: int):
        super().__init__()
        assert (split_item, group_type) == (3, 0)

    def construct(self, x, weight, bias=None, scale=None, offset=None, a_scale=None, a_offset=None, group_list=None):
        x, weight = x[0], weight[0]
        rows, experts = x.shape[0], weight.shape[0]
        row = ops.cast(ops.arange(rows), mstype.int64).expand_dims(0)
        ends = ops.cast(group_list, mstype.int64).reshape(experts, 1)
        # [experts, rows]: for how many experts e a row is before the end of e; it belongs to the first of them.
        before = ops.cast(row < ends, x.dtype)
        shifted = ops.concat((ops.zeros((1, rows), x.dtype), before[:-1]), 0)
        own = (before - shifted).expand_dims(2)
        stacked = ops.matmul(ops.tile(x.expand_dims(0), (experts, 1, 1)), weight)
        return (ops.ReduceSum()(stacked * own, 0),)


class Swiglu(StandIn):
    """silu(gate) up of x = [gate, up]."""

    def construct(self, x: Tensor, axis):
        gate, up = ops.split(x, x.shape[-1] // 2, axis)
        return gate * ops.sigmoid(gate) * up


class TopkExt(StandIn):
    """The k largest elements along the last axis, and where they are."""

    def construct(self, x: Tensor, k, dim=-1, largest=True, ordered=True):
        return ops.TopK()(x, k)


class SortExt(StandIn):
    """x in ascending order along the last axis, and where each element was; equal ones keep their order."""

    def construct(self, x: Tensor, dim=-1, descending=False, stable=False):
        # The position breaks ties, so the order does not depend on the kernel.
        length = x.shape[-1]
        ranked = ops.cast(x, mstype.float32) * length + ops.cast(ops.arange(length), mstype.float32)
        _, order = ops.Sort()(ranked)
        return ops.gather_elements(x, x.ndim - 1, ops.cast(order, mstype.int64)), order


class CumsumExt(StandIn):
    """Running sums along an axis."""

    def construct(self, x: Tensor, axis):
        return ops.cumsum(x, axis)


class IndexSelect(StandIn):
    """Slices of x along an axis."""

    def construct(self, x: Tensor, axis, index: Tensor):
        return ops.gather(x, index, axis)


class FmodScalar(StandIn):
    """The rest of x after division by a number."""

    def construct(self, x: Tensor, divisor):
        return x - (x // divisor) * divisor


class MoveTo(StandIn):
    """x, which is on the host already."""

    def construct(self, x: Tensor, to, blocking):
        return x


_PLACES = (
    (f"{_MOE}.ffn", "GroupedMatmul", GroupedMatmul),
    (f"{_MOE}.ffn", "Swiglu", Swiglu),
    (f"{_MOE}.router", "TopkExt", TopkExt),
    (f"{_MOE}.token_dispatcher", "SortExt", SortExt),
    (f"{_MOE}.token_dispatcher", "CumsumExt", CumsumExt),
    (f"{_MOE}.token_dispatcher", "IndexSelect", IndexSelect),
    (f"{_MOE}.token_dispatcher", "FmodScalar", FmodScalar),
    (f"{_MOE}.token_dispatcher", "ops.MoveTo", MoveTo),
    # In DeepSeek-V3, beside the experts.
    (_LATENT, "SplitWithSize", mcore_cpu.SplitWithSize),
)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replaces the operators, with MindFormers in training, while it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUN_MODE", "train")
        install(patch.setattr)
        yield


def install(setter=setattr):
    """Replaces the operators.

    Args:
        setter (callable): Sets an attribute, as setattr does; monkeypatch.setattr undoes it after a test.
    """
    mcore_cpu.install(setter)
    for module, place, stand_in in _PLACES:
        owner = importlib.import_module(module)
        *path, name = place.split(".")
        for part in path:
            owner = getattr(owner, part)
        setter(owner, name, stand_in)
