"""lora_dropout, and lora_delta with it: what is tested of them."""

import numpy as np

from mindlora.ops.lora_dropout import LoraDeltaWithDropout, LoraDropout, lora_dropout
from tests.ops.contract import Operator, named, normals
from tests.ops.operators import lora_delta


def seed_and_rate(seed, rate):
    return named(("seed", "rate"), (np.int32([seed]), np.float32([rate])), ("int32", "float32"))


def inputs(dtype, tokens, k, seed=7, rate=0.3):
    return {**normals(dtype, x=(tokens, k)), **seed_and_rate(seed, rate)}


def dropped(reference, x, seed, rate):
    return reference.lora_dropout(x, int(seed[0]), rate[0])


def delta_with_dropout(reference, y0, x, a, b, scale, seed, rate):
    return y0 + (dropped(reference, x, seed, rate) @ a.T * scale) @ b.T


def gradients_with_delta(reference, dy, y0, x, a, b, scale, seed, rate):
    kept = dropped(reference, x, seed, rate)
    d_low, low = dy.astype(np.float64) @ b, kept @ a.T
    dx = dropped(reference, d_low * scale @ a, seed, rate)
    return {"y0": dy, "x": dx, "A": (d_low * scale).T @ kept, "B": dy.T @ (low * scale), "scale": np.sum(d_low * low)}


LORA_DROPOUT = Operator(
    name="lora_dropout",
    inputs=inputs,
    expected=dropped,
    terms=lambda *size: 4,
    function="LoraDropout",
    # (tokens, K, seed, rate)
    sizes=(
        *((0, 3), (1, 1, 0, 0.0), (3, 37, -1, 0.05), (31, 130, 2**31 - 1, 0.999), (31, 130, -1, 0.5)),
        *((31, 130, 12345, 0.05), (512, 64, 0, 0.5)),
    ),
    threaded=(9, 130),
    cell=LoraDropout,
    call=lora_dropout,
    cell_sizes=((31, 130, -5, 0.3), (1, 130, 8, 0.1), (40, 130, 12345, 0.05)),
    gradients=lambda reference, dy, x, seed, rate: {"x": dropped(reference, dy, seed, rate)},
    gradient_sizes=((3, 4, 11, 0.4), (9, 21, 11, 0.4)),
    gradient_terms=4,
    refused_size=(2, 3),
    alike=(("x",),),
    refused_shapes=(({"x": (9, 13, 10)}, "x has 3 dimensions: it must have 2."),),
    refused_values=(("rate", 0, 1.0, "rate is 1.000000: it must be in [0, 1)."),),
)
WITH_DELTA = Operator(
    name="lora_delta_with_dropout",
    op="lora_dropout",
    inputs=lambda *size: {**lora_delta.inputs(*size), **seed_and_rate(99, 0.25)},
    expected=delta_with_dropout,
    terms=lambda *size: 40,
    cell=LoraDeltaWithDropout,
    cell_sizes=((13, 37, 21, 5),),
    gradients=gradients_with_delta,
    gradient_sizes=((3, 4, 5, 2), (13, 37, 21, 5)),
    gradient_terms=40,
    # x is rounded once it is dropped, and so is what goes into the second dropout of its gradient.
    rounds_between=("result", "x", "A", "B", "scale"),
)
FORMS = (LORA_DROPOUT, WITH_DELTA)
