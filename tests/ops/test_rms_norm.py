"""rms_norm beyond tests/ops/test_contract.py: the bits of a row."""

import numpy as np

from tests.support.native import call, normal


def test_a_row_has_the_same_bits_among_any_others(isa):
    x, weight, eps = normal(70, 130, seed=1), normal(130, seed=2), np.float32([1e-2])
    together, alone = (
        call("RmsNorm", [(array, "float32") for array in (rows, weight, eps)], rows.shape, "float32")
        for rows in (x, x[41:42])
    )
    assert together[41].tobytes() == alone[0].tobytes()
