"""rounded_linear against its reference: weights in bfloat16 and in NF4, every instruction set, any number of tokens."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.core.errors import BackendError
from mindlora.ops import Nf4Array, dequantize, quantize
from mindlora.ops.rounded_linear import RoundedLinear
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, tensor, values
from tests.support.op_paths import ISAS, PATHS
from tests.support.pooled_adapters import MAX_RANK, TRUE_RANKS, pooled, popularity

pytestmark = pytest.mark.skipif(PATHS[0] != "cpu", reason="there is no kernel for an NPU")
ON_ANY = pytest.mark.parametrize("isa", ISAS, indirect=True)
KINDS = pytest.mark.parametrize("kind", ["bfloat16", "nf4"])
# Odd ends of rows, of blocks and of vectors; the last is large enough for several threads and parts of K.
SIZES = [(1, 1), (37, 53), (64, 130), (129, 17), (1061, 530)]
# One token has loops of its own, 8 are multiplied together, and the sums of 64 are kept.
TOKENS = (0, 1, 2, 5, 8, 9, 17, 64, 67, 131)
K, N = 70, 53


def nf4(n, k):
    """The four tensors of a weight whose absmax are powers of two: in any order of operations it is decoded alike."""
    rng = np.random.default_rng(5)
    blocks = -(-k // 64)
    codes = rng.integers(0, 256, (n, blocks * 32), np.uint8)
    absmax = np.uint8(1) << rng.integers(0, 8, (n, blocks), np.uint8)
    scales = np.full(-(-n * blocks // 256), 2.0**-6, np.float32)
    return [codes, absmax, scales, np.zeros_like(scales)]


class Case:
    """A layer of a kind and a batch on it: what the kernel, the cell and the reference take."""

    def __init__(self, kind, tokens, k=K, n=N, pool_dtype="float32", popular="uniform"):
        self.kind, self.pool_dtype = kind, pool_dtype
        weight = normal(n, k, seed=2, dtype="bfloat16")
        self.parts, self.dtypes = [weight], ["bfloat16"]
        if kind == "nf4":
            self.parts, self.dtypes = nf4(n, k), ["uint8", "uint8", "float32", "float32"]
        self.x = normal(tokens, k, seed=1)
        self.pool = list(pooled(k + n, TRUE_RANKS, MAX_RANK, pool_dtype))
        self.indices = popularity(popular, tokens, len(TRUE_RANKS))
        self.bias = normal(n, seed=4)
        self.terms = 1 + k + MAX_RANK * k**0.5

    def native(self, bias=True, rows=slice(None)):
        """What the kernel computes of some tokens."""
        inputs = [(self.x[rows], "float32"), *zip(self.parts, self.dtypes), (self.pool[0], self.pool_dtype)]
        inputs += [(self.pool[1], "int32"), (self.pool[2], "float32"), (self.indices[rows], "int32")]
        inputs += [(self.bias, "float32")] * bias
        name = "RoundedNf4Linear" if self.kind == "nf4" else "RoundedLinear"
        return call(name, inputs, (len(self.x[rows]), len(self.bias)), "float32")

    def expected(self, reference, bias=True):
        weight = self.parts[0]
        if self.kind == "nf4":
            weight = dequantize(Nf4Array(*self.parts, (len(self.bias), self.x.shape[1])))
        return reference.rounded_linear(self.x, weight, *self.pool, self.indices, self.bias if bias else None)

    def tensors(self):
        """The inputs of the cell."""
        parts = tuple(tensor(part, dtype) for part, dtype in zip(self.parts, self.dtypes))
        pool = tensor(self.pool[0], self.pool_dtype), *map(Tensor, self.pool[1:])
        return [Tensor(self.x), parts, *pool, Tensor(self.indices), Tensor(self.bias)]


@ON_ANY
@KINDS
@pytest.mark.parametrize("k, n", SIZES)
def test_the_kernel_is_the_reference(isa, reference, kind, k, n):
    for tokens in TOKENS:
        case = Case(kind, tokens, k, n)
        for bias in (False, True):
            assert_near(case.native(bias), case.expected(reference, bias), "float32", case.terms)


@ON_ANY
def test_any_absmax_is_decoded(isa, reference):
    weight = normal(200, 300, seed=2) * np.linspace(0.5, 1.5, 60000).reshape(200, 300).astype(np.float32)
    array = quantize(weight)
    case = Case("nf4", 9, 300, 200)
    case.parts = [array.codes, array.absmax, array.scales, array.offsets]
    # Here and there a number rounds to the other side than in the reference: of 300 terms one by 2^-8.
    np.testing.assert_allclose(case.native(), case.expected(reference), rtol=0, atol=0.03)


@ON_ANY
@KINDS
@pytest.mark.parametrize("pool", DTYPES)
def test_pools_of_any_dtype_are_widened_as_they_are_read(isa, reference, kind, pool):
    case = Case(kind, 7, pool_dtype=pool)
    assert_near(case.native(), case.expected(reference), "float32", case.terms)


@ON_ANY
@KINDS
def test_a_token_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(isa, library, kind):
    case = Case(kind, 73, 1061, 530)
    before = library.omp_get_max_threads()
    together = case.native()
    for start, end in ((0, 1), (7, 8), (3, 11), (10, 73)):
        np.testing.assert_array_equal(case.native(rows=slice(start, end)), together[start:end])
    try:
        for threads in (1, 3):
            library.omp_set_num_threads(threads)
            np.testing.assert_array_equal(case.native(), together)
    finally:
        library.omp_set_num_threads(before)


@KINDS
def test_the_cell_computes_it_for_any_number_of_tokens(mode, library, reference, kind):
    cells = {has_bias: RoundedLinear(kind == "nf4", has_bias) for has_bias in (False, True)}
    for tokens in (1, 3, 70):
        case = Case(kind, tokens, popular="skipped")
        *inputs, bias = case.tensors()
        for has_bias, cell in cells.items():
            found = cell(*inputs, *[bias] * has_bias)
            assert found.dtype == ms.float32
            assert_near(values(found), case.expected(reference, has_bias), "float32", case.terms)


@pytest.mark.parametrize(
    "kind, at, dtype, message",
    [
        ("bfloat16", 0, ms.bfloat16, "x is BFloat16: it must be Float32."),
        ("bfloat16", 2, ms.int32, "pool is Int32: it must be Float32, Float16 or BFloat16."),
        ("bfloat16", 5, ms.int64, "indices is Int64: it must be Int32."),
        ("nf4", 6, ms.float16, "bias is Float16: it must be Float32."),
    ],
)
def test_refused_dtypes(library, pynative_mode, kind, at, dtype, message):
    inputs = Case(kind, 4).tensors()
    inputs[at] = inputs[at].astype(dtype)
    with pytest.raises(BackendError) as error:
        RoundedLinear(kind == "nf4", True)(*inputs)
    assert str(error.value) == f"rounded_linear (cpu): {message}"


@pytest.mark.parametrize(
    "kind, at, message",
    [
        ("bfloat16", ms.float32, "W is Float32: it must be BFloat16."),
        ("nf4", ms.int32, "codes is Int32: it must be UInt8."),
    ],
)
def test_refused_weights(library, pynative_mode, kind, at, message):
    inputs = Case(kind, 4).tensors()
    inputs[1] = (inputs[1][0].astype(at), *inputs[1][1:])
    with pytest.raises(BackendError) as error:
        RoundedLinear(kind == "nf4", True)(*inputs)
    assert str(error.value) == f"rounded_linear (cpu): {message}"


@KINDS
@pytest.mark.parametrize(
    "at, shape, message",
    [
        (2, (7, MAX_RANK, K + N - 1), "K [+] N is 123 in one input and 122 in another."),
        (6, (N + 1,), "N is 53 in one input and 54 in another."),
    ],
)
def test_refused_shapes(library, pynative_mode, kind, at, shape, message):
    inputs = Case(kind, 4).tensors()
    inputs[at] = Tensor(np.zeros(shape, np.float32))
    with refused_by_kernel(r"mindlora rounded_linear: " + message.replace(".", "[.]")):
        RoundedLinear(kind == "nf4", True)(*inputs).asnumpy()
