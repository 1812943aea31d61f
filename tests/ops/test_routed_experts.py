"""routed_experts against its reference: dtypes, instruction sets, adapters, experts, other tokens, errors."""

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.core.errors import BackendError
from mindlora.core.numerics.nf4 import dequantize, quantize
from mindlora.ops.routed_experts import Nf4RoutedExperts, RoutedExperts
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, values

EXPERTS, SLOTS, MAX_RANK = 5, 3, 6
POOL = ["float32", "int32", "float32"]
KINDS = [*POOL, None, None, *POOL, *POOL, "int32"]
# Rank of gate_up and of down in each slot: as much as there is room for, one of the two alone, none.
RANKS = ((6, 1), (0, 3), (0, 0))


def case(shape, each=2, inner=9, held="float32"):
    """The inputs; each token has different experts, of which some have no token and others several, and any slot."""
    tokens, hidden = int(np.prod(shape[:-1])), shape[-1]
    rng = np.random.default_rng(tokens)
    chosen = [rng.permutation(EXPERTS - 1)[:each] for _ in range(tokens)]
    return [
        normal(*shape, seed=1),
        np.array(chosen, np.int32).reshape(tokens, each),
        normal(tokens, each, seed=2),
        normal(EXPERTS, 2 * inner, hidden, seed=3, dtype=held),
        normal(EXPERTS, hidden, inner, seed=4, dtype=held),
        *pairs(hidden, 2 * inner, 0),
        *pairs(inner, hidden, 1),
        rng.integers(-1, SLOTS, tokens + 2).astype(np.int32),
    ]


def pairs(wide, high, which):
    """A pool of adapters, its ranks and scales. What no adapter uses is NaN."""
    pool = np.full((SLOTS, EXPERTS * MAX_RANK, wide + high), np.nan, np.float32)
    ranks = np.array([EXPERTS * rank[which] for rank in RANKS], np.int32)
    for slot, rank in enumerate(ranks):
        pool[slot, :rank] = normal(rank, wide + high, seed=5 + slot)
    # Less than a row for each expert.
    ranks[ranks == 0] = EXPERTS - 1
    return pool, ranks, np.array([0.5, -1.5, 2], np.float32)


def native(inputs, held="float32"):
    kinds = [kind or held for kind in KINDS]
    return call("RoutedExperts", list(zip(inputs, kinds)), inputs[0].shape, "float32")


def expected_of(reference, inputs):
    return reference.routed_experts(*inputs[:5], tuple(inputs[5:8]), tuple(inputs[8:11]), inputs[11])


def packed(inputs):
    """The same inputs with both weights in NF4, as mcore stacks them, and with what these decode to."""
    quantized, decoded = [], list(inputs)
    for at in (3, 4):
        experts, rows, columns = inputs[at].shape
        array = quantize(np.ascontiguousarray(inputs[at].swapaxes(1, 2)).reshape(-1, rows))
        quantized += [array.codes, array.absmax, array.scales, array.offsets]
        decoded[at] = dequantize(array).reshape(experts, columns, rows).swapaxes(1, 2)
    return [*inputs[:3], *quantized, *inputs[5:]], decoded


def native_packed(inputs):
    kinds = [*KINDS[:3], *["uint8", "uint8", "float32", "float32"] * 2, *KINDS[5:]]
    return call("Nf4RoutedExperts", list(zip(inputs, kinds)), inputs[0].shape, "float32")


@pytest.mark.parametrize("held", DTYPES)
def test_the_kernel_is_the_reference(isa, reference, held):
    for shape, each, inner in (((0, 16), 2, 9), ((1, 1), 1, 1), ((3, 40), 2, 33), ((2, 3, 67), 4, 130)):
        inputs = case(shape, each, inner, held)
        assert_near(native(inputs, held), expected_of(reference, inputs), "float32", 64 * inner * shape[-1])


def test_a_token_has_the_same_bits_among_any_others(isa):
    x, experts, weights, *held, slots = case((41, 70), inner=90)
    together = native([x, experts, weights, *held, slots])
    for row in (0, 17, 40):
        one = slice(row, row + 1)
        alone = native([x[one], experts[one], weights[one], *held, slots[one]])
        assert together[row].tobytes() == alone[0].tobytes()


def test_experts_in_nf4_are_the_reference_of_what_they_decode_to(isa, reference):
    # The border of gate and up is within a block, at the end of one, and in the middle of many.
    for shape, each, inner in (
        ((0, 16), 2, 9),
        ((1, 1), 1, 1),
        ((3, 40), 2, 33),
        ((2, 3, 67), 4, 130),
        ((5, 200), 2, 64),
    ):
        inputs, decoded = packed(case(shape, each, inner))
        assert_near(native_packed(inputs), expected_of(reference, decoded), "float32", 64 * inner * shape[-1])


def test_a_token_has_the_same_bits_among_any_others_in_nf4(isa):
    (x, experts, weights, *held, slots), _ = packed(case((41, 70), inner=90))
    together = native_packed([x, experts, weights, *held, slots])
    for row in (0, 17, 40):
        one = slice(row, row + 1)
        alone = native_packed([x[one], experts[one], weights[one], *held, slots[one]])
        assert together[row].tobytes() == alone[0].tobytes()


class Net(nn.Cell):
    def __init__(self, kind=RoutedExperts):
        super().__init__()
        self.experts = kind()

    def construct(self, *inputs):
        return self.experts(*inputs)


def test_dynamic_shapes(mode, reference):
    net = Net()
    _, _, _, *held, _ = map(Tensor, case((1, 24)))
    net.set_inputs(
        Tensor(shape=[None, None, 24], dtype=ms.float32),
        Tensor(shape=[None, 2], dtype=ms.int32),
        Tensor(shape=[None, 2], dtype=ms.float32),
        *held,
        Tensor(shape=[None], dtype=ms.int32),
    )
    for rows in ((1, 5), (7, 1)):
        inputs = case((*rows, 24))
        found = values(net(*map(Tensor, inputs)))
        assert_near(found, expected_of(reference, inputs), "float32", 64 * 9 * 24)


def test_dynamic_shapes_in_nf4(graph_mode, reference):
    net = Net(Nf4RoutedExperts)
    _, _, _, *held, _ = map(Tensor, packed(case((1, 24)))[0])
    net.set_inputs(
        Tensor(shape=[None, None, 24], dtype=ms.float32),
        Tensor(shape=[None, 2], dtype=ms.int32),
        Tensor(shape=[None, 2], dtype=ms.float32),
        *held,
        Tensor(shape=[None], dtype=ms.int32),
    )
    for rows in ((1, 5), (7, 1)):
        inputs, decoded = packed(case((*rows, 24)))
        assert_near(values(net(*map(Tensor, inputs))), expected_of(reference, decoded), "float32", 64 * 9 * 24)


@pytest.mark.parametrize(
    "at, shape, message",
    [
        (3, (EXPERTS * 8, 64), "the number of blocks of a row is 1 in one input and 2 in another."),
        (4, (EXPERTS * 8 - 1, 1), "the number of rows is 40 in one input and 39 in another."),
        (5, (2,), "the number of groups is 1 in one input and 2 in another."),
        (7, (EXPERTS * 9 + 1, 32), "the number of rows is 45 in one input and 46 in another."),
        (11, (SLOTS, 30, 25), "K + N is 26 in one input and 25 in another."),
    ],
)
def test_refused_shapes_in_nf4(library, graph_mode, at, shape, message):
    inputs, _ = packed(case((3, 8)))
    inputs[at] = np.zeros(shape, inputs[at].dtype)
    with refused_by_kernel(f"mindlora routed_experts: {re.escape(message)}"):
        Net(Nf4RoutedExperts)(*map(Tensor, inputs)).asnumpy()


@pytest.mark.parametrize(
    "at, index, value, message",
    [
        (1, (2, 1), -1, f"row 2 asks for expert -1 of {EXPERTS}."),
        (1, (2, 1), EXPERTS, f"row 2 asks for expert {EXPERTS} of {EXPERTS}."),
        (11, 1, SLOTS, f"row 1 asks for slot {SLOTS} of {SLOTS}."),
        (6, 2, 7, "slot 2 has 7 rows of pairs for 5 experts, and room for 30."),
        (9, 0, 35, "slot 0 has 35 rows of pairs for 5 experts, and room for 30."),
    ],
)
def test_refused_values(library, graph_mode, at, index, value, message):
    inputs = case((3, 8))
    inputs[at][index] = value
    with refused_by_kernel(f"mindlora routed_experts: {re.escape(message)}"):
        Net()(*map(Tensor, inputs)).asnumpy()


@pytest.mark.parametrize(
    "at, shape, message",
    [
        (1, (4, 2), "the number of tokens is 3 in one input and 4 in another."),
        (2, (3, 3), "the number of experts of a token is 2 in one input and 3 in another."),
        (3, (EXPERTS, 17, 8), "2 I is 17 in one input and 18 in another."),
        (4, (EXPERTS, 7, 9), "H is 8 in one input and 7 in another."),
        (5, (SLOTS, 30, 25), "K + N is 26 in one input and 25 in another."),
        (5, (SLOTS, 29, 26), "a slot has 29 rows, which is not a number for each of 5 experts."),
        (8, (SLOTS, 5 * 257, 17), "rank is 257: it must be 1 to 256."),
        (11, (2,), "slots has 2 "),
    ],
)
def test_refused_shapes(library, graph_mode, at, shape, message):
    inputs = case((3, 8))
    inputs[at] = np.zeros(shape, inputs[at].dtype)
    with refused_by_kernel(f"mindlora routed_experts: {re.escape(message)}"):
        Net()(*map(Tensor, inputs)).asnumpy()


def test_refused_dtypes(library, mode):
    inputs = list(map(Tensor, case((3, 8))))
    inputs[4] = inputs[4].astype(ms.float16)
    with pytest.raises(BackendError) as error:
        Net()(*inputs)
    assert str(error.value) == "routed_experts (cpu): down is Float16 and gate_up is Float32: cast them to one dtype."
