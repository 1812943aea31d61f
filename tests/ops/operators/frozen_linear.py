"""frozen_linear, its gradient, both with products in bfloat16, and rows by number: what is tested of them."""

import functools

import numpy as np

from mindlora.ops.frozen_linear import FrozenExperts, FrozenLinear
from tests.ops.contract import Operator, normals
from tests.support.op_paths import ISAS

# Odd ends of micro kernels, of vectors, of pairs and of parts of W; two passes of tokens; several threads.
SIZES = (
    *((0, 37, 53), (1, 1, 1), (2, 37, 53), (8, 64, 32), (9, 129, 17), (33, 31, 70)),
    *((515, 70, 37), (3, 520, 260), (40, 577, 530)),
)
REFUSED = (
    ({"x": (3, 8)}, "K is 8 in one input and 9 in another."),
    ({"W": (9,)}, "W has 1 dimensions: it must have 2."),
)


def inputs(dtype, tokens, k, n, held="bfloat16"):
    return {**normals(dtype, x=(tokens, k)), **normals(held, W=(n, k))}


def inputs_of_gradient(dtype, tokens, k, n, held="bfloat16"):
    return {**normals(dtype, dy=(tokens, n)), **normals(held, W=(n, k))}


def rows(dtype, tokens, k, n, held="bfloat16"):
    ids = np.random.default_rng(0).integers(0, n, (tokens, 2), np.int32)
    return {"ids": (ids, "int32"), **normals(held, W=(n, k)), "like": (np.zeros(1, np.float32), dtype)}


def of_dy(name):
    return lambda reference, dy, w: getattr(reference, name)(dy, None, w)[0]


def form(name, function, **fields):
    """Returns the table of a form: x and the result are float32, whatever W is held in."""
    shared = {"sizes": SIZES, "threaded": (40, 577, 530), "dtypes": ("float32",), "isas": tuple(ISAS)}
    return Operator(name=name, op="frozen_linear", function=function, **{**shared, **fields})


def forward(name, held="bfloat16", **fields):
    return form(
        name,
        inputs=functools.partial(inputs, held=held),
        terms=lambda tokens, k, n: k,
        rows=("x",),
        cell_sizes=((5, 37, 53), (1, 1, 1), (70, 64, 17)),
        refused_size=(3, 9, 7),
        unchecked=("W",),
        refused_shapes=REFUSED,
        **fields,
    )


def backward(name, function, held="bfloat16", **fields):
    return form(
        name,
        function,
        inputs=functools.partial(inputs_of_gradient, held=held),
        terms=lambda tokens, k, n: n,
        rows=("dy",),
        refused_size=(3, 9, 7),
        refused_shapes=(({"dy": (3, 8)}, "N is 8 in one input and 7 in another."),),
        **fields,
    )


GRADIENT_SIZES = {"gradients": ("x",), "gradient_sizes": ((3, 5, 4), (33, 70, 37)), "gradient_terms": 37}
EXACT = forward(
    "frozen_linear",
    function="FrozenLinear",
    cell=FrozenLinear,
    refused_by_kernel=(
        ("x", "float16", "x is float16: it must be float32."),
        ("W", "float32", "W is float32: it must be float16."),
    ),
    **GRADIENT_SIZES,
)
IN_FLOAT16 = forward(
    "frozen_linear_in_float16", held="float16", function="FrozenLinear", cell=FrozenLinear, **GRADIENT_SIZES
)
ROUNDED = forward(
    "frozen_linear_rounded",
    function="FrozenLinearRounded",
    expected=lambda reference, x, w: reference.frozen_linear_rounded(x, w),
    cell=lambda: FrozenLinear(rounds=True),
    refused_by_kernel=(("W", "float16", "W is float16: it must be bfloat16."),),
)
ROWS = form(
    "frozen_rows",
    "FrozenRows",
    inputs=rows,
    expected=lambda reference, ids, w, like: reference.frozen_rows(ids, w),
    terms=lambda tokens, k, n: 1,
    result="float32",
    isas=tuple(ISAS[:1]),
    refused_size=(3, 9, 7),
    refused_values=(
        ("ids", (1, 0), 7, "ids has 7, and W has 7 rows."),
        ("ids", (1, 0), -1, "ids has -1, and W has 7 rows."),
    ),
)
EXPERTS = 3
IN_TURN = "each must be at least the one before, and at most 5, the rows of x."


def experts(dtype, tokens, k, n, held="bfloat16", gradient=False):
    """One of the experts has no row, and the last rows are no expert's."""
    groups = np.array([tokens // 2, tokens // 2, tokens - tokens // 5], np.int64)
    rows = normals(dtype, dy=(tokens, n)) if gradient else normals(dtype, x=(tokens, k))
    return {**rows, **normals(held, W=(EXPERTS * k, n)), "groups": (groups, "int64")}


def by_experts(name, held="bfloat16", rounds=False, **fields):
    return form(
        name,
        inputs=functools.partial(experts, held=held),
        expected=lambda reference, x, w, groups: reference.frozen_experts(
            reference.rounded(x) if rounds else x, w, groups
        ),
        function="FrozenExpertsRounded" if rounds else "FrozenExperts",
        terms=lambda tokens, k, n: k,
        cell=lambda: FrozenExperts(rounds),
        cell_sizes=((5, 37, 53), (1, 1, 1), (70, 64, 17)),
        refused_size=(5, 9, 7),
        unchecked=("W",),
        refused_shapes=(
            ({"x": (5, 8)}, "in is 8 in one input and 9 in another."),
            ({"W": (28, 7)}, "the rows of W is 28 in one input and 27 in another."),
            ({"groups": (3, 1)}, "groups has 2 dimensions: it must have 1."),
        ),
        refused_values=(
            ("groups", 1, 1, f"groups has 1 after 2: {IN_TURN}"),
            ("groups", 2, 6, f"groups has 6 after 2: {IN_TURN}"),
        ),
        **fields,
    )


def rounded_gradient_of_experts(reference, dy, w, groups):
    return reference.frozen_experts_grad(reference.rounded(dy), None, w, groups)[0]


GRADIENTS_OF_EXPERTS = {
    "gradients": lambda reference, dy, x, w, groups: {"x": reference.frozen_experts_grad(dy, x, w, groups)[0]},
    **{key: value for key, value in GRADIENT_SIZES.items() if key != "gradients"},
}
FORMS = (
    by_experts("frozen_experts", **GRADIENTS_OF_EXPERTS),
    by_experts("frozen_experts_in_float16", "float16", **GRADIENTS_OF_EXPERTS),
    by_experts("frozen_experts_rounded", rounds=True),
    form(
        "frozen_experts_rounded_grad",
        "FrozenExpertsRoundedGrad",
        inputs=functools.partial(experts, gradient=True),
        expected=rounded_gradient_of_experts,
        terms=lambda tokens, k, n: n,
        refused_size=(5, 9, 7),
        refused_shapes=(({"dy": (5, 8)}, "out is 8 in one input and 7 in another."),),
    ),
    *(EXACT, IN_FLOAT16, ROUNDED, ROWS),
    backward("frozen_linear_grad", "FrozenLinearGrad", expected=of_dy("frozen_linear_grad")),
    backward("frozen_linear_grad_in_float16", "FrozenLinearGrad", "float16", expected=of_dy("frozen_linear_grad")),
    backward("frozen_linear_rounded_grad", "FrozenLinearRoundedGrad", expected=of_dy("frozen_linear_rounded_grad")),
)
