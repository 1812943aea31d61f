"""lora_linear beyond tests/ops/test_contract.py: a scale that is a number."""

import numpy as np
import pytest
from mindspore import Tensor

from mindlora.ops import lora_linear
from tests.ops.operators.lora_linear import PLAIN
from tests.support.native import assert_near, values


@pytest.mark.parametrize("scale", [0.0, -1.5])
def test_scale(each_path, reference, scale):
    x, w, a, b = [array for array, _ in PLAIN.inputs("float32", 3, 7, 9, 2).values()][:4]
    y = lora_linear(*map(Tensor, (x, w, a, b)), scale)
    assert_near(values(y), reference.lora_linear(x, w, a, b, scale), "float32", 20)
    assert np.allclose(values(y), x @ w.T, atol=1e-4) == (scale == 0)
