"""routed_experts beyond tests/ops/test_contract.py: the bits of a token."""

import pytest

from tests.ops.operators.routed_experts import FORMS
from tests.support.native import call


def native(operator, inputs):
    return call(operator.function, inputs, inputs[0][0].shape, "float32")


@pytest.mark.parametrize("operator", FORMS, ids=[operator.name for operator in FORMS])
def test_a_token_has_the_same_bits_among_any_others(isa, operator):
    inputs = operator.inputs("float32", 41, 70, 2, 90)
    together = native(operator, list(inputs.values()))
    for row in (0, 17, 40):
        one = slice(row, row + 1)
        of_row = {name: (inputs[name][0][one], inputs[name][1]) for name in ("x", "experts", "weights", "slots")}
        alone = native(operator, list({**inputs, **of_row}.values()))
        assert together[row].tobytes() == alone[0].tobytes()
