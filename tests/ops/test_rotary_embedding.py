"""rotary_embedding beyond tests/ops/test_contract.py: batches, and the angle of a position."""

import numpy as np
from mindspore import Tensor, ops

from mindlora.ops.rotary_embedding import RotaryEmbedding
from tests.ops.operators.rotary_embedding import ROTARY_EMBEDDING
from tests.support.native import assert_near, call, values


def test_each_row_of_a_batch_begins_at_the_first_position(mode, reference):
    x, cos, sin = (array for array, _ in ROTARY_EMBEDDING.inputs("float32", 5, 3, 16).values())
    rows = np.stack([x, 2 * x, -x])
    y = RotaryEmbedding()(Tensor(rows), Tensor(cos), Tensor(sin))
    gradient = ops.GradOperation(sens_param=True)(RotaryEmbedding())(
        Tensor(rows), Tensor(cos), Tensor(sin), Tensor(rows)
    )
    for i, row in enumerate(rows):
        assert_near(values(y)[i], reference.rotary_embedding(row, cos, sin), "float32", 4)
        assert_near(values(gradient)[i], reference.rotary_embedding_grad(row, cos, sin), "float32", 4)


def test_it_turns_a_pair_by_the_angle_of_its_position(library):
    angle = np.float32([[0.0], [1.0], [2.5]])
    cos, sin = (np.tile(table(angle), 2) for table in (np.cos, np.sin))
    y = call("RotaryEmbedding", [(a, "float32") for a in (np.float32([[1, 0]] * 3), cos, sin)], (3, 2), "float32")
    np.testing.assert_allclose(y, np.concatenate([np.cos(angle), np.sin(angle)], axis=1), rtol=1e-6)
