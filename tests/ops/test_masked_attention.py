"""masked_attention beyond tests/ops/test_contract.py: any mask, queries that see nothing, what is masked."""

import numpy as np

from tests.ops.operators.masked_attention import GRADIENT, SCALE, causal
from tests.support.native import assert_near, call, normal


def case(*size):
    """Returns q, k, v, and the gradient of y."""
    dy, q, k, v, *_ = (array for array, _ in GRADIENT.inputs("float32", *size).values())
    return q, k, v, dy


def of_kernels(q, k, v, dy, mask):
    """Returns y and the joined gradients."""
    inputs = [(array, "float32") for array in (q, k, v, mask, np.float32([SCALE]))]
    of_heads = (*q.shape[:2], q.shape[2] + 2 * k.shape[2], q.shape[3])
    y = call("MaskedAttention", inputs, q.shape, "float32")
    return y, call("MaskedAttentionGrad", [(dy, "float32"), *inputs], of_heads, "float32")


def test_a_mask_may_be_anything_that_is_added(isa, reference):
    q, k, v, dy = case(1, 50, 2, 2, 16)
    mask = normal(1, 1, 50, 50, seed=5)
    y, gradients = of_kernels(q, k, v, dy, mask)
    assert_near(y, reference.masked_attention(q, k, v, mask, SCALE), "float32", 8)
    assert_near(gradients, reference.masked_attention_grad(dy, q, k, v, mask, SCALE), "float32", 64)


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
