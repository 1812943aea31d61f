"""routed_experts, of dense weights and of weights in NF4: what is tested of it."""

import dataclasses

import numpy as np

from mindlora.core.numerics.nf4 import Nf4Array, dequantize, quantize
from mindlora.ops.routed_experts import Nf4RoutedExperts, RoutedExperts
from tests.ops.contract import Operator, named, normals
from tests.ops.operators.nf4_linear import WEIGHT_DTYPES
from tests.support.native import normal

EXPERTS, SLOTS, MAX_RANK = 5, 3, 6
# Rank of gate_up and of down in each slot: as much as there is room for, one of the two alone, none.
RANKS = ((6, 1), (0, 3), (0, 0))


def adapters(of, wide, high, which):
    """A pool, its ranks and scales, by name. What no adapter uses is NaN."""
    pool = np.full((SLOTS, EXPERTS * MAX_RANK, wide + high), np.nan, np.float32)
    ranks = np.array([EXPERTS * rank[which] for rank in RANKS], np.int32)
    for slot, rank in enumerate(ranks):
        pool[slot, :rank] = normal(rank, wide + high, seed=5 + slot)
    # Less than a row for each expert.
    ranks[ranks == 0] = EXPERTS - 1
    names = (f"{of} pool", f"{of} ranks", f"{of} scales")
    return named(names, (pool, ranks, np.array([0.5, -1.5, 2], np.float32)), ("float32", "int32", "float32"))


def inputs(dtype, tokens, hidden, each=2, inner=9):
    """Each token has different experts, of which some have no token and others several, and any slot."""
    shape = tokens if isinstance(tokens, tuple) else (tokens,)
    count = int(np.prod(shape))
    rng = np.random.default_rng(count)
    chosen = [rng.permutation(EXPERTS - 1)[:each] for _ in range(count)]
    return {
        **normals("float32", x=(*shape, hidden)),
        "experts": (np.array(chosen, np.int32).reshape(count, each), "int32"),
        **normals("float32", weights=(count, each)),
        **normals(dtype, gate_up=(EXPERTS, 2 * inner, hidden), down=(EXPERTS, hidden, inner)),
        **adapters("gate_up", hidden, 2 * inner, 0),
        **adapters("down", inner, hidden, 1),
        "slots": (rng.integers(-1, SLOTS, count + 2).astype(np.int32), "int32"),
    }


def transposed(weight):
    """A weight [experts, out, in] as mcore stacks it, [experts * in, out]."""
    return np.ascontiguousarray(weight.swapaxes(1, 2)).reshape(-1, weight.shape[1])


def inputs_transposed(dtype, *size):
    """The same with both weights as mcore stacks them."""
    weights = ("gate_up", "down")
    return {
        name: (transposed(array) if name in weights else array, its_dtype)
        for name, (array, its_dtype) in inputs(dtype, *size).items()
    }


def inputs_in_nf4(dtype, *size):
    """The same with both weights as mcore stacks them, in NF4."""
    packed = {}
    for name, (array, its_dtype) in inputs(dtype, *size).items():
        if name in ("gate_up", "down"):
            weight = quantize(transposed(array))
            names = [f"{name} {part}" for part in ("codes", "absmax", "block scales", "offsets")]
            packed.update(named(names, (weight.codes, weight.absmax, weight.scales, weight.offsets), WEIGHT_DTYPES))
        else:
            packed[name] = array, its_dtype
    return packed


def expected(reference, *arrays):
    return reference.routed_experts(*arrays[:5], arrays[5:8], arrays[8:11], arrays[11])


def expected_transposed(reference, x, experts, weights, gate_up, down, *others):
    stacked = (weight.reshape(EXPERTS, -1, weight.shape[1]).swapaxes(1, 2) for weight in (gate_up, down))
    return expected(reference, x, experts, weights, *stacked, *others)


def expected_in_nf4(reference, x, experts, weights, *others):
    of_gate_up, of_down, adapters_and_slots = others[:4], others[4:8], others[8:]
    hidden = x.shape[-1]
    outs = adapters_and_slots[0].shape[2] - hidden, hidden
    decoded = []
    for parts, out in zip((of_gate_up, of_down), outs):
        weight = dequantize(Nf4Array(*parts, (len(parts[0]), out)))
        decoded.append(weight.reshape(EXPERTS, -1, out).swapaxes(1, 2))
    return expected(reference, x, experts, weights, *decoded, *adapters_and_slots)


def terms(tokens, hidden, each=2, inner=9):
    return 64 * inner * hidden


# (tokens, H, experts of a token, I)
SIZES = ((0, 16), (1, 1, 1, 1), (3, 40, 2, 33), ((2, 3), 67, 4, 130))
CELL_SIZES = (((1, 5), 24), ((7, 1), 24))
DENSE = Operator(
    name="routed_experts",
    inputs=inputs,
    expected=expected,
    terms=terms,
    result="float32",
    function="RoutedExperts",
    sizes=SIZES,
    threaded=(41, 70, 2, 90),
    rows=("x", "experts", "weights", "slots"),
    cell=RoutedExperts,
    cell_sizes=CELL_SIZES,
    refused_size=(3, 8),
    alike=(("gate_up", "down"),),
    refused_shapes=(
        ({"experts": (4, 2)}, "the number of tokens is 3 in one input and 4 in another."),
        ({"weights": (3, 3)}, "the number of experts of a token is 2 in one input and 3 in another."),
        ({"gate_up": (EXPERTS, 17, 8)}, "2 I is 17 in one input and 18 in another."),
        ({"down": (EXPERTS, 7, 9)}, "H is 8 in one input and 7 in another."),
        ({"gate_up pool": (SLOTS, 30, 25)}, "K + N is 26 in one input and 25 in another."),
        ({"gate_up pool": (SLOTS, 29, 26)}, "a slot has 29 rows, which is not a number for each of 5 experts."),
        ({"down pool": (SLOTS, 5 * 257, 17)}, "rank is 257: it must be 1 to 256."),
        ({"slots": (2,)}, "slots has 2 elements: it must have one for each of the 3 tokens, or more."),
    ),
    refused_values=(
        ("experts", (2, 1), -1, f"row 2 asks for expert -1 of {EXPERTS}."),
        ("experts", (2, 1), EXPERTS, f"row 2 asks for expert {EXPERTS} of {EXPERTS}."),
        ("slots", 1, SLOTS, f"row 1 asks for slot {SLOTS} of {SLOTS}."),
        ("gate_up ranks", 2, 7, "slot 2 has 7 rows of pairs for 5 experts, and room for 30."),
        ("down ranks", 0, 35, "slot 0 has 35 rows of pairs for 5 experts, and room for 30."),
    ),
)
TRANSPOSED = dataclasses.replace(
    DENSE,
    name="routed_experts_transposed",
    op="routed_experts",
    inputs=inputs_transposed,
    expected=expected_transposed,
    # Columns of whole vectors alone, and some beside them.
    sizes=(*SIZES, (6, 20, 2, 64)),
    refused_shapes=(
        ({"down": (EXPERTS, 8, 9)}, "down has 3 dimensions: it must have 2."),
        ({"gate_up": (EXPERTS * 8 + 1, 18)}, "the number of rows of gate_up is 41 in one input and 40 in another."),
        ({"down": (EXPERTS * 9 + 1, 8)}, "the number of rows of down is 46 in one input and 45 in another."),
        ({"gate_up": (EXPERTS * 8, 17)}, "2 I is 17 in one input and 18 in another."),
        ({"down": (EXPERTS * 9, 7)}, "H is 8 in one input and 7 in another."),
        ({"gate_up pool": (SLOTS, 30, 25)}, "K + N is 26 in one input and 25 in another."),
    ),
)
IN_NF4 = Operator(
    name="nf4_routed_experts",
    op="routed_experts",
    inputs=inputs_in_nf4,
    expected=expected_in_nf4,
    terms=terms,
    dtypes=("float32",),
    function="Nf4RoutedExperts",
    # The border of gate and up is within a block, at the end of one, and in the middle of many.
    sizes=(*SIZES, (5, 200, 2, 64)),
    threaded=(41, 70, 2, 90),
    rows=("x", "experts", "weights", "slots"),
    cell=Nf4RoutedExperts,
    cell_sizes=CELL_SIZES,
    refused_size=(3, 8),
    refused_shapes=(
        ({"gate_up codes": (EXPERTS * 8, 64)}, "the number of blocks of a row is 1 in one input and 2 in another."),
        ({"gate_up absmax": (EXPERTS * 8 - 1, 1)}, "the number of rows is 40 in one input and 39 in another."),
        ({"gate_up block scales": (2,)}, "the number of groups is 1 in one input and 2 in another."),
        ({"down codes": (EXPERTS * 9 + 1, 32)}, "the number of rows is 45 in one input and 46 in another."),
        ({"gate_up pool": (SLOTS, 30, 25)}, "K + N is 26 in one input and 25 in another."),
    ),
)
FORMS = (DENSE, TRANSPOSED, IN_NF4)
