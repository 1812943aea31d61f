"""One call of each operator of the CPU library: inputs that are large enough for several threads, and its output."""

from typing import Dict, List, Tuple

import numpy as np

from mindlora.ops import quantize
from tests.support.attention_batches import Sequences
from tests.support.native import normal
from tests.support.pooled_adapters import pooled, popularity

# (array, dtype) of each input and of the output
Tensors = List[Tuple[np.ndarray, str]]
SCALE = (np.float32(0.5), "float32")


def floats(*shapes: Tuple[int, ...]) -> Tensors:
    """Returns a tensor of normal values of each shape."""
    return [(normal(*shape, seed=seed), "float32") for seed, shape in enumerate(shapes)]


def pool(width: int, tokens: int) -> Tensors:
    """Returns pool, ranks, scales and indices."""
    arrays = [*pooled(width), popularity("uniform", tokens)]
    return list(zip(arrays, ("float32", "int32", "float32", "int32")))


def written(*shape: int, dtype: str = "float32") -> Tensors:
    """Returns an output that holds no result."""
    return [(np.full(shape, -1 if dtype == "int32" else np.nan, dtype), dtype)]


def nf4(rows: int, columns: int) -> Tensors:
    """Returns a weight in 4 bits."""
    weight = quantize(normal(rows, columns))
    arrays = (weight.codes, weight.absmax, weight.scales, weight.offsets)
    return list(zip(arrays, ("uint8", "uint8", "float32", "float32")))


def in_bfloat16(rows: int, columns: int) -> Tensors:
    """Returns a weight in bfloat16."""
    return [(normal(rows, columns, dtype="bfloat16"), "bfloat16")]


def attention() -> Tensors:
    """Returns a batch of a prompt, a piece of one, and a token."""
    inputs = Sequences([70, 33, 64], 2, 2, 40).batch([(0, 0, 70), (1, 32, 33), (2, 16, 64)], 8, unused=0)
    return [(array, "int32" if array.dtype == np.int32 else "float32") for array in inputs]


def experts() -> Tensors:
    """Returns 70 tokens, of which each goes to two of five experts with one of three adapters, or none."""
    chosen = np.arange(140, dtype=np.int32).reshape(70, 2) % 5
    tokens = floats((70, 64)) + [(chosen, "int32")] + floats((70, 2), (5, 66, 64), (5, 64, 33))
    pools = []
    for shape in ((3, 20, 130), (3, 20, 97)):
        # So many rows are in use: of rank 4, 1 and 2 for each expert.
        pools += [*floats(shape), (np.array([20, 5, 10], np.int32), "int32"), *floats((3,))]
    return tokens + pools + [(np.arange(70, dtype=np.int32) % 4 - 1, "int32")]


def causal() -> Tensors:
    """Returns queries, keys, values, a causal mask and a scale: two rows of 70 tokens, six heads on two of keys."""
    mask = np.triu(np.full((2, 1, 70, 70), -10000, np.float32), 1)
    return floats((2, 70, 6, 40), (2, 70, 2, 40), (2, 70, 2, 40)) + [(mask, "float32"), SCALE]


def cases() -> Dict[str, Tensors]:
    """Returns the inputs and the output of each operator, by the name of its function."""
    return {
        "LoraDelta": floats((40, 53), (40, 37), (5, 37), (53, 5)) + [SCALE] + written(40, 53),
        "LoraDropout": floats((9, 130)) + [(np.int32([7]), "int32"), SCALE] + written(9, 130),
        "LoraLinear": floats((3, 256), (260, 256), (5, 256), (260, 5)) + [SCALE] + floats((260,)) + written(3, 260),
        "MaskedAttention": causal() + written(2, 70, 6, 40),
        "MaskedAttentionGrad": floats((2, 70, 6, 40)) + causal() + written(2, 70, 10, 40),
        "MultiLoraDelta": floats((9, 53), (9, 37)) + pool(90, 9) + written(9, 53),
        "MultiLoraLinear": floats((3, 256), (260, 256)) + pool(516, 3) + floats((260,)) + written(3, 260),
        "MultiLoraSlotWrite": [*pool(90, 0)[:3], (np.int32([3]), "int32"), *floats((13, 90)), SCALE]
        + written(1, dtype="int32"),
        "Nf4Linear": floats((9, 130)) + nf4(300, 130) + floats((300,)) + written(9, 300),
        "Nf4LinearGrad": floats((9, 300)) + nf4(300, 130) + written(9, 192),
        "Nf4LinearGradLike": floats((9, 300)) + nf4(300, 130) + floats((9, 130)) + written(9, 130),
        "RmsNorm": floats((300, 512), (512,)) + [SCALE] + written(300, 512),
        "RmsNormGrad": floats((300, 512), (300, 512), (512,)) + [SCALE] + written(300, 512),
        "RmsNormWeightGrad": floats((300, 512), (300, 512), (512,)) + [SCALE] + written(512),
        "RoutedExperts": experts() + written(70, 64),
        "RotaryEmbedding": floats((300, 128), (300, 64), (300, 64)) + written(300, 128),
        "RoundedLinear": floats((70, 256)) + in_bfloat16(260, 256) + pool(516, 70) + written(70, 260),
        "RotaryEmbeddingGrad": floats((2, 300, 128), (300, 64), (300, 64)) + written(2, 300, 128),
        "PagedAttention": attention() + written(119, 160),
    }
