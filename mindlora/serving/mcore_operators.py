"""The parts of mcore models' network with different operators on Ascend and on a CPU: pairs of equivalent cells.

On a CPU they use mindlora's operators, in float32, and on Ascend MindSpore's, as in MindFormers' own inference.
"""

from typing import Any, Dict, NamedTuple, Optional, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer

from mindlora.models.architectures.architecture import dtype_of
from mindlora.models.architectures.mcore_sizes import DecoderSizes
from mindlora.ops.paged_attention import PagedAttention
from mindlora.ops.rms_norm import RmsNorm
from mindlora.serving.settings import EngineSettings

# MindFormers' number for each way of rotating pairs of a head, for ApplyRotaryPosEmb.
_HALVES, _NEIGHBOURS = 2, 3
# The number added to the score of a masked token.
_UNSEEN = -10000.0


class Dtypes(NamedTuple):
    """The dtypes of a network.

    Attributes:
        compute: The dtype in which linear cells and the cells between them compute, and of the cache.
        linear: The dtype of the weights of linear cells and experts, which are cast to ``compute``.
        table: The dtype of the embedding.
        norm: The dtype of norms and their weights.
        rotary: The dtype of the cosines and sines of positions.
    """

    compute: mstype.Type
    linear: mstype.Type
    table: mstype.Type
    norm: mstype.Type
    rotary: mstype.Type


def dtypes_of(model_config: Dict[str, Any]) -> Dtypes:
    """Returns the dtypes of the network that the model_config of a YAML describes.

    On Ascend weights are held in the products' dtype: cast once, and not in each step.
    """
    if on_cpu():
        wide, held = mstype.float32, getattr(mstype, dtype_of(model_config, "params_dtype"))
        return Dtypes(wide, held, held, wide, wide)
    compute = getattr(mstype, dtype_of(model_config, "compute_dtype", "bfloat16"))
    norm, rotary = (getattr(mstype, dtype_of(model_config, key)) for key in ("layernorm_compute_dtype", "rotary_dtype"))
    return Dtypes(compute, compute, compute, norm, rotary)


def on_cpu() -> bool:
    """Returns whether the network is for a CPU."""
    return bool(ms.get_context("device_target") == "CPU")


def rms_norm(eps: float) -> nn.Cell:
    """Returns the cell of x [..., H] and weight [H] -> x / sqrt(mean(x^2) + eps) * weight, of the dtype of x."""
    return CpuRmsNorm(eps) if on_cpu() else AscendRmsNorm(eps)


def largest(count: int) -> nn.Cell:
    """Returns the cell of x [rows, N] -> (values, places) [rows, count] of the largest of each row, places int32."""
    return CpuLargest(count) if on_cpu() else AscendLargest(count)


def positions_of(sizes: DecoderSizes, settings: EngineSettings, dtypes: Dtypes) -> nn.Cell:
    """Returns the cell that computes attention's inputs for all layers from a step's arrays, as one tuple.

    Its inputs are context_lengths, query_lengths, block_tables, slot_mapping and positions, as in StepInputs. In a step
    with one token per request, query_lengths and positions may be None on Ascend.
    """
    kind = CpuPositions if on_cpu() else AscendPositions
    return kind(sizes, settings.seq_length, dtypes)


def cached_attention(sizes: DecoderSizes, settings: EngineSettings, dtype: mstype.Type) -> nn.Cell:
    """Returns the cell of query, key, value [T, heads * head_dim] and that tuple -> attention over the cache, as query.

    It first rotates queries and keys by their positions and writes keys and values to the cache.
    """
    kind = CpuCachedAttention if on_cpu() else AscendCachedAttention
    return kind(sizes, settings, dtype)


class CpuRmsNorm(nn.Cell):
    """See rms_norm."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = Tensor([eps], mstype.float32)
        self.norm = RmsNorm()

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.norm(x, weight, self.eps)


class AscendRmsNorm(nn.Cell):
    """See rms_norm; it computes in the dtype of the weight."""

    def __init__(self, eps: float):
        super().__init__()
        self.norm = ops.RmsNorm(eps)
        self.cast = ops.Cast()

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.cast(self.norm(self.cast(x, weight.dtype), weight)[0], x.dtype)


class CpuLargest(nn.Cell):
    """See largest."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count
        self.top = ops.TopK(sorted=True)

    def construct(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        return self.top(x, self.count)


class AscendLargest(nn.Cell):
    """See largest."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def construct(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        values, places = mint.topk(x, self.count, -1)
        return values, ops.cast(places, mstype.int32)


class CpuPositions(nn.Cell):
    """See positions_of."""

    def __init__(self, sizes: DecoderSizes, length: int, dtypes: Dtypes):
        super().__init__()
        cos, sin = _rotary_tables(length, sizes, together=False)
        self.cos, self.sin = Tensor(cos, dtypes.rotary), Tensor(sin, dtypes.rotary)
        self.gather = ops.Gather()

    def construct(self, context_lengths, query_lengths, block_tables, slot_mapping, positions):
        cos, sin = self.gather(self.cos, positions, 0), self.gather(self.sin, positions, 0)
        return cos, sin, block_tables, context_lengths, query_lengths


class AscendPositions(nn.Cell):
    """See positions_of. If requests have several tokens, it computes the mask too, [T, length]."""

    def __init__(self, sizes: DecoderSizes, length: int, dtypes: Dtypes):
        super().__init__()
        cos, sin = _rotary_tables(length, sizes, together=sizes.interleaved)
        self.cos, self.sin = Tensor(cos, dtypes.rotary), Tensor(sin, dtypes.rotary)
        self.places = Tensor(np.arange(length, dtype=np.int32))
        self.unseen = Tensor(_UNSEEN, dtypes.compute)
        self.dtype = dtypes.compute
        self.gather = ops.Gather()
        self.cast = ops.Cast()

    def construct(self, context_lengths, query_lengths, block_tables, slot_mapping, positions):
        mask = None
        if positions is None:
            positions = context_lengths - 1
        else:
            mask = self.cast(self.places > ops.expand_dims(positions, 1), self.dtype) * self.unseen
        cos, sin = self.gather(self.cos, positions, 0), self.gather(self.sin, positions, 0)
        return cos, sin, block_tables, context_lengths, query_lengths, slot_mapping, mask


class _Cache(nn.Cell):
    """Keys and values of a layer, [blocks, block_size, kv_heads, head_dim]."""

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtype: mstype.Type):
        super().__init__()
        shape = [settings.block_count, settings.block_size, sizes.kv_heads, sizes.head_dim]
        self.key_cache, self.value_cache = (
            Parameter(initializer("zeros", shape, dtype), name=name, requires_grad=False)
            for name in ("key_cache", "value_cache")
        )


class CpuCachedAttention(_Cache):
    """See cached_attention."""

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtype: mstype.Type):
        super().__init__(sizes, settings, dtype)
        self.head_dim = sizes.head_dim
        self.order = _rotary_order(sizes)
        self.attention = PagedAttention()

    def construct(self, query, key, value, positions):
        cos, sin, block_tables, context_lengths, query_lengths = positions
        if self.order is not None:
            query, key = self._ordered(query), self._ordered(key)
        return self.attention(
            query, key, value, cos, sin, self.key_cache, self.value_cache, block_tables, context_lengths, query_lengths
        )

    def _ordered(self, x):
        return ops.reshape(ops.gather(ops.reshape(x, (-1, self.head_dim)), self.order, 1), x.shape)


class AscendCachedAttention(_Cache):
    """See cached_attention. MindSpore reads the lengths from the graph's inputs of these names: see ServedStep."""

    def __init__(self, sizes: DecoderSizes, settings: EngineSettings, dtype: mstype.Type):
        super().__init__(sizes, settings, dtype)
        self.turn = ops.ApplyRotaryPosEmb(_NEIGHBOURS if sizes.interleaved else _HALVES)
        self.write = ops.auto_generate.ReshapeAndCache()
        self.attention = ops.auto_generate.PagedAttention(sizes.heads, sizes.head_dim**-0.5, sizes.kv_heads)
        self.depend = ops.Depend()

    def construct(self, query, key, value, positions):
        cos, sin, block_tables, context_lengths, query_lengths, slot_mapping, mask = positions
        query, key = self.turn(query, key, cos, sin, context_lengths)
        query = self.depend(query, self.write(key, value, self.key_cache, self.value_cache, slot_mapping))
        if mask is None:
            return self.attention(query, self.key_cache, self.value_cache, block_tables, context_lengths)
        return self.attention(
            query, self.key_cache, self.value_cache, block_tables, context_lengths, None, None, mask, query_lengths
        )


def _rotary_order(sizes: DecoderSizes) -> Optional[Tensor]:
    """Returns the order of a head's elements in which elements i and i + head_dim / 2 form a pair.

    None if they already do. Applied to both queries and keys, the order changes no score.
    """
    turned, half = sizes.rotary, sizes.head_dim // 2
    if turned == sizes.head_dim and not sizes.interleaved:
        return None
    pairs = np.arange(turned).reshape((-1, 2) if sizes.interleaved else (2, -1))
    first, second = pairs.T if sizes.interleaved else pairs
    rest = np.arange(turned, sizes.head_dim)
    kept = half - turned // 2
    return Tensor(np.concatenate([first, rest[:kept], second, rest[kept:]]).astype(np.int32))


def _rotary_tables(positions: int, sizes: DecoderSizes, together: bool) -> Tuple[np.ndarray, np.ndarray]:
    """Returns cosine and sine [positions, head_dim] of the angles; position 0 is not rotated.

    The two elements of a pair are neighbours (``together``), or half a head apart.
    """
    frequencies = np.zeros(sizes.head_dim // 2, np.float32)
    turned = np.arange(0, sizes.rotary, 2, dtype=np.float32)
    frequencies[: len(turned)] = sizes.rope_theta ** -(turned / sizes.rotary)
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)
    angles = np.repeat(angles, 2, axis=1) if together else np.concatenate([angles, angles], axis=1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
