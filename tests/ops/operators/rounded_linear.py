"""rounded_linear, of weights in bfloat16 and in NF4: what is tested of it."""

import dataclasses

import numpy as np
from mindspore import nn

from mindlora.ops import Nf4Array, dequantize
from mindlora.ops.rounded_linear import RoundedLinear
from tests.ops.contract import Operator, named, normals, without_last
from tests.ops.operators.multi_lora_delta import adapters, indices
from tests.ops.operators.nf4_linear import WEIGHT_DTYPES
from tests.support.op_paths import ISAS
from tests.support.pooled_adapters import MAX_RANK, SLOTS

K, N = 70, 53


def nf4(n, k):
    """The four tensors of a weight whose absmax are powers of two: in any order of operations it is decoded alike."""
    rng = np.random.default_rng(5)
    blocks = -(-k // 64)
    codes = rng.integers(0, 256, (n, blocks * 32), np.uint8)
    absmax = np.uint8(1) << rng.integers(0, 8, (n, blocks), np.uint8)
    scales = np.full(-(-n * blocks // 256), 2.0**-6, np.float32)
    return [codes, absmax, scales, np.zeros_like(scales)]


def inputs_with(weight, pool_dtype, tokens, k, n, kind):
    """Returns the inputs around the Inputs of a weight."""
    adapted = {**adapters(k, n, dtype=pool_dtype), **indices(tokens, kind)}
    return {**normals("float32", x=(tokens, k)), **weight, **adapted, **normals("float32", bias=(n,))}


def inputs(pool_dtype, tokens, k=K, n=N, kind="uniform"):
    return inputs_with(normals("bfloat16", W=(n, k)), pool_dtype, tokens, k, n, kind)


def inputs_in_nf4(pool_dtype, tokens, k=K, n=N, kind="uniform"):
    # The adapters have scales too.
    weight = named(("codes", "absmax", "block scales", "offsets"), nf4(n, k), WEIGHT_DTYPES)
    return inputs_with(weight, pool_dtype, tokens, k, n, kind)


def expected_in_nf4(reference, x, codes, absmax, scales, offsets, *others):
    weight = dequantize(Nf4Array(codes, absmax, scales, offsets, (len(codes), x.shape[-1])))
    return reference.rounded_linear(x, weight, *others)


class Flat(nn.Cell):
    """Takes the tensors of the weight one by one."""

    def __init__(self, quantized, has_bias):
        super().__init__()
        self.linear, self.parts = RoundedLinear(quantized, has_bias), 4 if quantized else 1

    def construct(self, x, *others):
        return self.linear(x, others[: self.parts], *others[self.parts :])


WITH_BIAS = Operator(
    name="rounded_linear_with_bias",
    op="rounded_linear",
    inputs=inputs,
    terms=lambda tokens, k=K, n=N, kind="": 1 + k + MAX_RANK * k**0.5,
    result="float32",
    function="RoundedLinear",
    # One token has loops of its own, 8 are multiplied together, and the sums of 64 are kept. Odd ends of rows, of
    # blocks and of vectors; the last are large enough for several threads and parts of K.
    sizes=(
        *((0, 37, 53), (1, 1, 1), (2, 37, 53), (5, 64, 130), (8, 129, 17), (9, 37, 53), (17, 64, 130), (64, 129, 17)),
        *((67, 70, 53), (131, 37, 53), (1, 1061, 530), (9, 1061, 530)),
    ),
    threaded=(73, 1061, 530),
    rows=("x", "indices"),
    isas=tuple(ISAS[:4]),
    cell=lambda: Flat(False, True),
    cell_sizes=((1, K, N, "skipped"), (3, K, N, "skipped"), (70, K, N, "skipped")),
    refused_size=(4,),
    alike=(("pool",),),
    refused_shapes=(
        ({"pool": (SLOTS, MAX_RANK, K + N - 1)}, "K + N is 123 in one input and 122 in another."),
        ({"bias": (N + 1,)}, "N is 53 in one input and 54 in another."),
    ),
)
IN_NF4 = dataclasses.replace(
    WITH_BIAS,
    name="rounded_nf4_linear_with_bias",
    inputs=inputs_in_nf4,
    expected=expected_in_nf4,
    function="RoundedNf4Linear",
    cell=lambda: Flat(True, True),
)
FEW = ((1, 37, 53), (9, 129, 17), (67, 70, 53))
FORMS = (
    WITH_BIAS,
    IN_NF4,
    without_last(WITH_BIAS, name="rounded_linear", cell=lambda: Flat(False, False), sizes=FEW),
    without_last(IN_NF4, name="rounded_nf4_linear", cell=lambda: Flat(True, False), sizes=FEW),
)
