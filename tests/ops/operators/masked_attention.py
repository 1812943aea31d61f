"""masked_attention: what is tested of it."""

import numpy as np

from mindlora.ops.masked_attention import MaskedAttention
from tests.ops.contract import Operator, normals

SCALE = 0.3


def causal(rows, tokens, padding=0, segment=None):
    """Returns a mask as MindFormers makes it: of no later key, of none in another segment, and of no padding."""
    sees = np.tril(np.ones((rows, 1, tokens, tokens), bool))
    if segment is not None:
        segments = np.arange(tokens) // segment
        sees &= segments[:, None] == segments
    sees[-1:, :, :, tokens - padding :] = False
    return np.where(sees, 0, -10000).astype(np.float32)


def inputs(dtype, rows, tokens, heads, key_heads, size, padding=0, segment=None):
    key = rows, tokens, key_heads, size
    others = (causal(rows, tokens, padding, segment), dtype), (np.float32([SCALE]), dtype)
    return {**normals(dtype, q=(rows, tokens, heads, size), k=key, v=key), **dict(zip(("mask", "scale"), others))}


def inputs_of_gradient(dtype, rows, tokens, heads, key_heads, size, *mask):
    return {
        **normals(dtype, dy=(rows, tokens, heads, size)),
        **inputs(dtype, rows, tokens, heads, key_heads, size, *mask),
    }


def gradients(reference, dy, q, k, v, mask, scale):
    heads = q.shape[2], q.shape[2] + k.shape[2]
    return dict(zip("qkv", np.split(reference.masked_attention_grad(dy, q, k, v, mask, scale), heads, axis=2)))


# (rows, tokens, heads, heads of keys, D, padding, segment)
SIZES = (
    *((1, 1, 1, 1, 1), (2, 5, 4, 2, 6), (1, 33, 3, 3, 40), (2, 70, 4, 1, 64), (1, 130, 2, 2, 80)),
    *((2, 100, 4, 2, 24, 40), (2, 100, 4, 2, 24, 0, 33), (2, 100, 4, 2, 24, 3, 8)),
)
MASKED_ATTENTION = Operator(
    name="masked_attention",
    inputs=inputs,
    terms=lambda *size: 16,
    dtypes=("float32",),
    function="MaskedAttention",
    sizes=SIZES,
    threaded=(2, 70, 6, 2, 40),
    cell=MaskedAttention,
    cell_sizes=((2, 19, 4, 2, 8, 4),),
    gradients=gradients,
    gradient_sizes=((1, 4, 2, 1, 3), (2, 19, 4, 2, 8, 4)),
    gradient_terms=64,
    refused_size=(2, 19, 4, 2, 8),
    refused_shapes=(
        ({"q": (2, 19, 32)}, "query has 3 dimensions: it must have 4."),
        ({"q": (2, 19, 3, 8)}, "query has 3 heads and key 2: those of query must be a multiple of those of key."),
        ({"k": (1, 19, 2, 8)}, "the number of rows is 2 in one input and 1 in another."),
        ({"k": (2, 19, 4, 8)}, "the number of heads is 4 in one input and 2 in another."),
        ({"v": (2, 19, 2, 7)}, "D is 8 in one input and 7 in another."),
        ({"mask": (2, 1, 18, 19)}, "the number of tokens is 19 in one input and 18 in another."),
        ({"mask": (2, 1, 19, 18)}, "the number of tokens is 19 in one input and 18 in another."),
    ),
)
GRADIENT = Operator(
    name="masked_attention_grad",
    op="masked_attention",
    inputs=inputs_of_gradient,
    expected=lambda reference, *arrays: reference.masked_attention_grad(*arrays),
    terms=lambda *size: 64,
    dtypes=("float32",),
    function="MaskedAttentionGrad",
    sizes=SIZES,
    threaded=(2, 70, 6, 2, 40),
    refused_size=(2, 70, 6, 2, 40),
    refused_shapes=(({"dy": (2, 70, 5, 40)}, "the shape of y is 5 in one input and 6 in another."),),
    refused_by_kernel=(("mask", "float16", "mask is float16: it must be float32."),),
)
FORMS = (MASKED_ATTENTION, GRADIENT)
