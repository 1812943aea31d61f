"""frozen_linear beyond tests/ops/test_contract.py: cells whose gradients are rounded, rows by number, and refusals."""

import re

import mindspore as ms
import numpy as np
import pytest

from mindlora.core.errors import BackendError
from mindlora.ops.frozen_linear import FrozenLinear, FrozenRows
from tests.support.native import assert_near, normal, tensor, values
from tests.support.op_paths import PATHS

pytestmark = pytest.mark.skipif(PATHS[0] != "cpu", reason="NPUs have no kernel for it")


@pytest.fixture(autouse=True)
def in_graph_mode(library):
    ms.set_context(mode=ms.GRAPH_MODE)


def test_dy_is_rounded_where_x_is(reference):
    x, w, dy = normal(5, 37), normal(17, 37, seed=1, dtype="bfloat16"), normal(5, 17, seed=2)
    gradient = ms.ops.GradOperation(get_all=True, sens_param=True)(FrozenLinear(rounds=True))
    of_x, of_w = gradient(tensor(x, "float32"), tensor(w, "bfloat16"), tensor(dy, "float32"))
    assert_near(values(of_x), reference.frozen_linear_rounded_grad(dy, x, w)[0], "float32", 17)
    assert not values(of_w).any() and of_w.dtype == ms.bfloat16
    assert np.abs(values(of_x) - reference.frozen_linear_grad(dy, x, w)[0]).max() > 1e-3


@pytest.mark.parametrize("held", ["bfloat16", "float16"])
def test_rows_by_number_are_widened(held):
    table, ids = normal(7, 9, dtype=held), np.int32([[6, 0, 3], [3, 3, 1]])
    found = FrozenRows()(tensor(ids, "int32"), tensor(table, held))
    np.testing.assert_array_equal(values(found), table[ids])
    assert found.dtype == ms.float32


@pytest.mark.parametrize(
    "rounds, held, words",
    [
        (False, "float32", "W is Float32: it must be BFloat16 or Float16."),
        (True, "float16", "W is Float16: it must be BFloat16."),
    ],
)
def test_a_weight_that_it_does_not_take_is_refused(rounds, held, words):
    with pytest.raises(BackendError, match=re.escape(f"frozen_linear (cpu): {words}")):
        FrozenLinear(rounds)(tensor(normal(2, 3), "float32"), tensor(normal(4, 3), held))
