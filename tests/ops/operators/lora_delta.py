"""lora_delta: what is tested of it."""

from mindlora.ops import LoraDelta, lora_delta
from tests.ops.contract import SCALE, Operator, normals


def inputs(dtype, tokens, k, n, rank):
    return {**normals(dtype, y0=(tokens, n), x=(tokens, k), A=(rank, k), B=(n, rank)), "scale": SCALE}


LORA_DELTA = Operator(
    name="lora_delta",
    inputs=inputs,
    # The size of the sums: K products, then r products of sums of size sqrt(K).
    terms=lambda tokens, k, n, rank: 1 + rank * k**0.5,
    function="LoraDelta",
    # Ends of blocks of 16 tokens and of chunks of 64, of vectors of 4 to 16, and of panels of B.
    sizes=(
        *((0, 37, 53, 8), (1, 1, 1, 1), (2, 8, 65, 15), (3, 37, 53, 13), (4, 127, 63, 15), (5, 15, 17, 128)),
        *((8, 70, 129, 16), (16, 37, 53, 1), (17, 16, 16, 15), (31, 37, 53, 64), (63, 17, 15, 15), (65, 64, 64, 1)),
        *((130, 128, 128, 8), (512, 37, 53, 256)),
    ),
    threaded=(40, 37, 53, 5),
    cell=LoraDelta,
    call=lora_delta,
    cell_sizes=((31, 37, 53, 13), (1, 37, 53, 1), (3, 1, 1, 8), (512, 37, 53, 256), (0, 37, 53, 64)),
    gradients=lambda reference, dy, y0, *arrays: dict(
        zip(("y0", "x", "A", "B", "scale"), reference.lora_delta_grad(dy, *arrays))
    ),
    gradient_sizes=((3, 4, 5, 2), (1, 7, 9, 1), (31, 7, 9, 13)),
    gradient_terms=160,
    refused_size=(5, 7, 9, 3),
    alike=(("y0", "x", "A", "B"),),
    unchecked=("scale",),
    refused_shapes=(
        ({"A": (257, 7), "B": (9, 257)}, "rank is 257: it must be 1 to 256."),
        ({"B": (9, 4)}, "the rank is 3 in one input and 4 in another."),
        ({"x": (5, 8)}, "K is 8 in one input and 7 in another."),
        ({"B": (8, 3)}, "N is 9 in one input and 8 in another."),
        ({"x": (4, 7)}, "the number of tokens is 5 in one input and 4 in another."),
    ),
    refused_by_kernel=(("A", "float16", "A is float16: it must be float32."),),
)
FORMS = (LORA_DELTA,)
