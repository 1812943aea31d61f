"""rounded_linear beyond tests/ops/test_contract.py: any absmax."""

import numpy as np
import pytest

from mindlora.ops import quantize
from tests.ops.operators.rounded_linear import IN_NF4
from tests.support.native import call, normal
from tests.support.op_paths import ISAS, PATHS

pytestmark = pytest.mark.skipif(PATHS[0] != "cpu", reason="NPUs have no kernel for it")


@pytest.mark.parametrize("isa", ISAS[:4], indirect=True)
def test_any_absmax_is_decoded(isa, reference):
    weight = normal(200, 300, seed=2) * np.linspace(0.5, 1.5, 60000).reshape(200, 300).astype(np.float32)
    array = quantize(weight)
    parts = (array.codes, array.absmax, array.scales, array.offsets)
    inputs = IN_NF4.inputs("float32", 9, 300, 200)
    for name, part in zip(list(inputs)[1:5], parts):
        inputs[name] = part, inputs[name][1]
    expected = IN_NF4.expected(reference, *(given for given, _ in inputs.values()))
    # Here and there a number rounds to the other side than in the reference: of 300 terms one by 2^-8.
    found = call(IN_NF4.function, list(inputs.values()), expected.shape, "float32")
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.03)
