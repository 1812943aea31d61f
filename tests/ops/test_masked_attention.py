"""masked_attention and its gradient against the reference: heads, masks, instruction sets, modes, errors."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindlora.core.errors import BackendError
from mindlora.ops.masked_attention import MaskedAttention
from tests.support.finite_differences import finite_differences
from tests.support.native import assert_near, call, normal, refused_by_kernel, values

SCALE = 0.3
# (rows, tokens, heads, heads of keys, D)
SHAPES = [(1, 1, 1, 1, 1), (2, 5, 4, 2, 6), (1, 33, 3, 3, 40), (2, 70, 4, 1, 64), (1, 130, 2, 2, 80)]


def causal(rows, tokens, padding=0, segment=None):
    """Returns a mask as MindFormers makes it: of no later key, of none in another segment, and of no padding."""
    sees = np.tril(np.ones((rows, 1, tokens, tokens), bool))
    if segment is not None:
        segments = np.arange(tokens) // segment
        sees &= segments[:, None] == segments
    sees[-1:, :, :, tokens - padding :] = False
    return np.where(sees, 0, -10000).astype(np.float32)


def case(rows, tokens, heads, key_heads, size):
    """Returns q, k, v, and the gradient of y."""
    query, key = (rows, tokens, heads, size), (rows, tokens, key_heads, size)
    return normal(*query, seed=1), normal(*key, seed=2), normal(*key, seed=3), normal(*query, seed=4)


def of_kernels(q, k, v, dy, mask):
    """Returns y and the joined gradients."""
    inputs = [(array, "float32") for array in (q, k, v, mask, np.float32([SCALE]))]
    of_heads = (*q.shape[:2], q.shape[2] + 2 * k.shape[2], q.shape[3])
    y = call("MaskedAttention", inputs, q.shape, "float32")
    return y, call("MaskedAttentionGrad", [(dy, "float32"), *inputs], of_heads, "float32")


def assert_reference(reference, q, k, v, dy, mask):
    y, gradients = of_kernels(q, k, v, dy, mask)
    assert_near(y, reference.masked_attention(q, k, v, mask, SCALE), "float32", 8)
    assert_near(gradients, reference.masked_attention_grad(dy, q, k, v, mask, SCALE), "float32", 64)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.attention, self.scale = MaskedAttention(), Tensor([SCALE], ms.float32)

    def construct(self, q, k, v, mask):
        return self.attention(q, k, v, mask, self.scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_are_the_reference(isa, reference, shape):
    assert_reference(reference, *case(*shape), causal(*shape[:2]))


@pytest.mark.parametrize("keys", [{"padding": 40}, {"segment": 33}, {"segment": 8, "padding": 3}], ids=str)
def test_segments_and_padding_are_masked(isa, reference, keys):
    assert_reference(reference, *case(2, 100, 4, 2, 24), causal(2, 100, **keys))


def test_a_mask_may_be_anything_that_is_added(isa, reference):
    q, k, v, dy = case(1, 50, 2, 2, 16)
    assert_reference(reference, q, k, v, dy, normal(1, 1, 50, 50, seed=5))


def test_a_query_that_sees_nothing_has_the_weights_of_its_scores(isa, reference):
    q, k, v, dy = case(1, 70, 1, 1, 16)
    mask = causal(1, 70)
    mask[:, :, 40] = -10000
    y, gradients = of_kernels(q, k, v, dy, mask)
    # Scores near -10000 have three digits left in float32.
    np.testing.assert_allclose(y, reference.masked_attention(q, k, v, mask, SCALE), atol=1e-3)
    np.testing.assert_allclose(gradients, reference.masked_attention_grad(dy, q, k, v, mask, SCALE), atol=2e-2)


def test_what_is_masked_has_no_part_in_anything(isa):
    q, k, v, dy = case(1, 90, 2, 1, 16)
    mask = causal(1, 90, segment=45)
    y, gradients = of_kernels(q, k, v, dy, mask)
    for array in (q, k, v, dy):
        array[:, :45] *= -3
    others, of_others = of_kernels(q, k, v, dy, mask)
    np.testing.assert_array_equal(y[:, 45:], others[:, 45:])
    np.testing.assert_array_equal(gradients[:, 45:], of_others[:, 45:])


def test_the_reference_of_the_gradient_is_that_of_finite_differences(reference):
    q, k, v, dy = (array.astype(np.float64) for array in case(1, 4, 2, 1, 3))
    mask = causal(1, 4)
    gradients = reference.masked_attention_grad(dy, q, k, v, mask, SCALE)
    for gradient, array in zip(np.split(gradients, [2, 3], axis=2), (q, k, v)):
        wanted = finite_differences(lambda: (reference.masked_attention(q, k, v, mask, SCALE) * dy).sum(), array)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6, atol=1e-8)


def test_the_cell_gives_y_and_the_gradients(mode, reference):
    q, k, v, dy = case(2, 19, 4, 2, 8)
    mask, net = causal(2, 19, padding=4), Net()
    y = net(*map(Tensor, (q, k, v, mask)))
    gradients = ops.GradOperation(get_all=True, sens_param=True)(net)(*map(Tensor, (q, k, v, mask, dy)))
    assert_near(values(y), reference.masked_attention(q, k, v, mask, SCALE), "float32", 8)
    wanted = np.split(reference.masked_attention_grad(dy, q, k, v, mask, SCALE), [4, 6], axis=2)
    for gradient, expected in zip(gradients, wanted):
        assert_near(values(gradient), expected, "float32", 64)
    assert not values(gradients[3]).any()


@pytest.mark.parametrize(
    "at, shape, message",
    [
        (0, (2, 19, 32), "query has 3 dimensions: it must have 4."),
        (0, (2, 19, 3, 8), "query has 3 heads and key 2: those of query must be a multiple of those of key."),
        (1, (1, 19, 2, 8), "the number of rows is 2 in one input and 1 in another."),
        (2, (2, 19, 2, 7), "D is 8 in one input and 7 in another."),
        (3, (2, 1, 18, 19), "the number of tokens is 19 in one input and 18 in another."),
    ],
)
def test_refused_shapes(library, graph_mode, at, shape, message):
    inputs = [*case(2, 19, 4, 2, 8)[:3], causal(2, 19)]
    inputs[at] = np.zeros(shape, np.float32)
    with refused_by_kernel("mindlora masked_attention: " + message.replace(".", "[.]")):
        Net()(*map(Tensor, inputs)).asnumpy()


def test_other_dtypes_are_refused(library, mode):
    inputs = [Tensor(array) for array in (*case(2, 19, 4, 2, 8)[:3], causal(2, 19))]
    with pytest.raises(BackendError) as error:
        Net()(inputs[0], inputs[1].astype(ms.float16), *inputs[2:])
    assert str(error.value) == "masked_attention (cpu): k is Float16: it must be Float32."
