"""rounded_linear beyond tests/ops/test_contract.py: any absmax, and the bits of a token."""

import numpy as np
import pytest

from mindlora.ops import quantize
from tests.ops.operators.rounded_linear import IN_NF4, WITH_BIAS
from tests.support.native import call, normal
from tests.support.op_paths import ISAS, PATHS

pytestmark = pytest.mark.skipif(PATHS[0] != "cpu", reason="there is no kernel for an NPU")
ON_ANY = pytest.mark.parametrize("isa", ISAS, indirect=True)
KINDS = pytest.mark.parametrize("operator", [WITH_BIAS, IN_NF4], ids=["bfloat16", "nf4"])


def native(operator, inputs):
    """What the kernel computes."""
    return call(operator.function, list(inputs.values()), (len(inputs["x"][0]), len(inputs["bias"][0])), "float32")


@ON_ANY
def test_any_absmax_is_decoded(isa, reference):
    weight = normal(200, 300, seed=2) * np.linspace(0.5, 1.5, 60000).reshape(200, 300).astype(np.float32)
    array = quantize(weight)
    parts = (array.codes, array.absmax, array.scales, array.offsets)
    inputs = IN_NF4.inputs("float32", 9, 300, 200)
    for name, part in zip(list(inputs)[1:5], parts):
        inputs[name] = part, inputs[name][1]
    expected = IN_NF4.expected(reference, *(given for given, _ in inputs.values()))
    # Here and there a number rounds to the other side than in the reference: of 300 terms one by 2^-8.
    np.testing.assert_allclose(native(IN_NF4, inputs), expected, rtol=0, atol=0.03)


@ON_ANY
@KINDS
def test_a_token_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(isa, library, operator):
    inputs = operator.inputs("float32", 73, 1061, 530)
    before = library.omp_get_max_threads()
    together = native(operator, inputs)
    for start, end in ((0, 1), (7, 8), (3, 11), (10, 73)):
        rows = {name: (inputs[name][0][start:end], inputs[name][1]) for name in ("x", "indices")}
        np.testing.assert_array_equal(native(operator, {**inputs, **rows}), together[start:end])
    try:
        for threads in (1, 3):
            library.omp_set_num_threads(threads)
            np.testing.assert_array_equal(native(operator, inputs), together)
    finally:
        library.omp_set_num_threads(before)
