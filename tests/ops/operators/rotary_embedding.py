"""rotary_embedding and the kernel of its gradient: what is tested of them."""

from mindlora.ops.rotary_embedding import RotaryEmbedding
from tests.ops.contract import Operator, normals


def inputs(dtype, tokens, heads, size, table_dtype="float32"):
    # A table of normal values would show a halved table that is read in the wrong half.
    tables = normals(table_dtype, cos=(tokens, size), sin=(tokens, size))
    return {**normals(dtype, x=(tokens, heads * size)), **tables}


SIZES = ((0, 2, 16), (1, 1, 2), (3, 5, 40), (31, 2, 64), (70, 3, 128), (5, 1, 30), (300, 4, 64))
ROTARY_EMBEDDING = Operator(
    name="rotary_embedding",
    inputs=inputs,
    terms=lambda *size: 2,
    function="RotaryEmbedding",
    sizes=(*SIZES, (7, 3, 40, "float16"), (7, 3, 40, "bfloat16")),
    threaded=(300, 2, 64),
    cell=RotaryEmbedding,
    cell_sizes=((5, 3, 16), (1, 3, 16), (33, 3, 16)),
    gradients=lambda reference, *arrays: {"x": reference.rotary_embedding_grad(*arrays[:1], *arrays[2:])},
    gradient_sizes=((3, 2, 6), (7, 3, 40)),
    gradient_terms=4,
    refused_size=(4, 3, 16),
    alike=(("x",), ("cos", "sin")),
    refused_shapes=(
        ({"x": (48,)}, "x has 1 dimensions: it must have 2 or 3."),
        ({"x": (4, 40)}, "x has 40 numbers a token: that is not a multiple of D, which is 16 in cos."),
        ({"x": (1, 5, 48)}, "the number of tokens is 5 in one input and 4 in another."),
        ({"cos": (1, 4, 16)}, "cos has 3 dimensions: it must have 2."),
        ({"cos": (3, 16)}, "the number of tokens is 4 in one input and 3 in another."),
        ({"cos": (4, 15)}, "D is 15 in one input and 16 in another."),
        ({"sin": (5, 16)}, "the number of tokens is 4 in one input and 5 in another."),
        ({"cos": (4, 15), "sin": (4, 15)}, "D is 15 in cos: it must be even and at least 2."),
    ),
    refused_by_kernel=(("x", "int32", "dtype is int32: it must be float32, float16 or bfloat16."),),
)
GRADIENT = Operator(
    name="rotary_embedding_grad",
    op="rotary_embedding",
    inputs=inputs,
    expected=lambda reference, *arrays: reference.rotary_embedding_grad(*arrays),
    terms=lambda *size: 2,
    function="RotaryEmbeddingGrad",
    sizes=SIZES,
    threaded=(300, 2, 64),
)
FORMS = (ROTARY_EMBEDDING, GRADIENT)
