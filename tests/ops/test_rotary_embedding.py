"""rotary_embedding and its gradient against the reference: dtypes, instruction sets, modes, dynamic shapes, errors."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora.core.errors import BackendError
from mindlora.ops.rotary_embedding import RotaryEmbedding
from tests.support.finite_differences import finite_differences
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, tensor, values

# (tokens, heads, D)
SHAPES = [(0, 2, 16), (1, 1, 2), (3, 5, 40), (31, 2, 64), (70, 3, 128), (5, 1, 30)]


def case(tokens, heads, size, dtype="float32", table_dtype="float32"):
    """x, cos and sin. A table of normal values would show a halved table that is read in the wrong half."""
    tables = [normal(tokens, size, seed=seed, dtype=table_dtype) for seed in (1, 2)]
    return [normal(tokens, heads * size, dtype=dtype), *tables]


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.rotary = RotaryEmbedding()

    def construct(self, x, cos, sin):
        return self.rotary(x, cos, sin)


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_the_reference(isa, reference, dtype, table_dtype):
    for shape in SHAPES:
        x, cos, sin = case(*shape, dtype, table_dtype)
        y = call("RotaryEmbedding", [(x, dtype), (cos, table_dtype), (sin, table_dtype)], x.shape, dtype)
        assert_near(y, reference.rotary_embedding(x, cos, sin), dtype, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_the_gradient_is_the_reference(isa, reference, dtype):
    for shape in SHAPES:
        dy, cos, sin = case(*shape, dtype)
        dx = call("RotaryEmbeddingGrad", [(dy, dtype), (cos, "float32"), (sin, "float32")], dy.shape, dtype)
        assert_near(dx, reference.rotary_embedding_grad(dy, cos, sin), dtype, 2)


def test_the_reference_of_the_gradient_is_that_of_finite_differences(reference):
    x, cos, sin = (array.astype(np.float64) for array in case(3, 2, 6))
    dy = normal(3, 12, seed=3)
    expected = finite_differences(lambda: (reference.rotary_embedding(x, cos, sin) * dy).sum(), x)
    np.testing.assert_allclose(reference.rotary_embedding_grad(dy, cos, sin), expected, rtol=1e-6, atol=1e-8)


def test_each_row_of_a_batch_begins_at_the_first_position(mode, reference):
    x, cos, sin = case(5, 3, 16)
    rows = np.stack([x, 2 * x, -x])
    y = Net()(Tensor(rows), Tensor(cos), Tensor(sin))
    gradient = ops.GradOperation(sens_param=True)(Net())(Tensor(rows), Tensor(cos), Tensor(sin), Tensor(rows))
    for i, row in enumerate(rows):
        assert_near(values(y)[i], reference.rotary_embedding(row, cos, sin), "float32", 4)
        assert_near(values(gradient)[i], reference.rotary_embedding_grad(row, cos, sin), "float32", 4)


def test_many_tokens_on_several_threads(isa, reference):
    inputs = case(300, 4, 64)
    y = call("RotaryEmbedding", [(array, "float32") for array in inputs], inputs[0].shape, "float32")
    assert_near(y, reference.rotary_embedding(*inputs), "float32", 2)


def test_it_turns_a_pair_by_the_angle_of_its_position(library):
    angle = np.float32([[0.0], [1.0], [2.5]])
    cos, sin = (np.tile(table(angle), 2) for table in (np.cos, np.sin))
    y = call("RotaryEmbedding", [(a, "float32") for a in (np.float32([[1, 0]] * 3), cos, sin)], (3, 2), "float32")
    np.testing.assert_allclose(y, np.concatenate([np.cos(angle), np.sin(angle)], axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    "dtype, table_dtype", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16")]
)
def test_the_cell_takes_tokens_with_and_without_a_batch(mode, reference, dtype, table_dtype):
    x, cos, sin = case(7, 3, 40, dtype, table_dtype)
    expected = reference.rotary_embedding(x, cos, sin)
    for shape in ((7, 120), (1, 7, 120)):
        y = Net()(tensor(x.reshape(shape), dtype), tensor(cos, table_dtype), tensor(sin, table_dtype))
        assert y.dtype == getattr(ms, dtype)
        assert_near(values(y), expected.reshape(shape), dtype, 2)


def test_dynamic_shapes(mode, reference):
    net = Net()
    shapes = ([1, None, 48], [None, 16], [None, 16])
    net.set_inputs(*[Tensor(shape=shape, dtype=ms.float32) for shape in shapes])
    for tokens in (5, 1, 33):
        x, cos, sin = case(tokens, 3, 16)
        y = values(net(Tensor(x[None]), Tensor(cos), Tensor(sin)))
        assert_near(y[0], reference.rotary_embedding(x, cos, sin), "float32", 2)


@pytest.mark.parametrize(
    "at, shape, message",
    [
        (0, (48,), "x has 1 dimensions: it must have 2 or 3."),
        (0, (4, 40), "x has 40 numbers a token: that is not a multiple of D, which is 16 in cos."),
        (0, (1, 5, 48), "the number of tokens is 5 in one input and 4 in another."),
        (1, (1, 4, 16), "cos has 3 dimensions: it must have 2."),
        (1, (3, 16), "the number of tokens is 4 in one input and 3 in another."),
        (1, (4, 15), "D is 15 in one input and 16 in another."),
        (2, (5, 16), "the number of tokens is 4 in one input and 5 in another."),
    ],
)
def test_refused_shapes(library, graph_mode, at, shape, message):
    inputs = [Tensor(array) for array in case(4, 3, 16)]
    inputs[at] = Tensor(np.zeros(shape, np.float32))
    with refused_by_kernel("mindlora rotary_embedding: " + message.replace(".", "[.]")):
        Net()(*inputs).asnumpy()


def test_an_odd_head_is_refused(library, graph_mode):
    inputs = [Tensor(np.zeros(shape, np.float32)) for shape in ((4, 45), (4, 15), (4, 15))]
    with refused_by_kernel("mindlora rotary_embedding: D is 15 in cos: it must be even and at least 2"):
        Net()(*inputs).asnumpy()


@pytest.mark.parametrize(
    "at, dtype, message",
    [
        (0, ms.int32, "x is Int32: it must be Float32, Float16 or BFloat16."),
        (1, ms.float64, "cos is Float64: it must be Float32, Float16 or BFloat16."),
        (2, ms.float16, "sin is Float16 and cos is Float32: cast them to one dtype."),
    ],
)
def test_refused_dtypes(library, mode, at, dtype, message):
    inputs = [Tensor(array) for array in case(4, 3, 16)]
    inputs[at] = inputs[at].astype(dtype)
    with pytest.raises(BackendError) as error:
        Net()(*inputs)
    assert str(error.value) == f"rotary_embedding (cpu): {message}"
