"""routed_experts against its reference: dtypes, instruction sets, choices of experts, other tokens, errors."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from mindlora.errors import BackendError
from mindlora.ops.routed_experts import RoutedExperts
from tests.support.native import DTYPES, assert_near, call, normal, refused_by_kernel, values

EXPERTS = 5
KINDS = ["float32", "int32", "float32"]


def case(shape, each=2, inner=9, held="float32"):
    """The five inputs; each token has different experts, of which some have no token and others several."""
    tokens, hidden = int(np.prod(shape[:-1])), shape[-1]
    rng = np.random.default_rng(tokens)
    chosen = [rng.permutation(EXPERTS - 1)[:each] for _ in range(tokens)]
    return [
        normal(*shape, seed=1),
        np.array(chosen, np.int32).reshape(tokens, each),
        normal(tokens, each, seed=2),
        normal(EXPERTS, 2 * inner, hidden, seed=3, dtype=held),
        normal(EXPERTS, hidden, inner, seed=4, dtype=held),
    ]


def native(inputs, held="float32"):
    return call("RoutedExperts", list(zip(inputs, [*KINDS, held, held])), inputs[0].shape, "float32")


@pytest.mark.parametrize("held", DTYPES)
def test_the_kernel_is_the_reference(isa, reference, held):
    for shape, each, inner in (((0, 16), 2, 9), ((1, 1), 1, 1), ((3, 40), 2, 33), ((2, 3, 67), 4, 130)):
        inputs = case(shape, each, inner, held)
        expected = reference.routed_experts(*inputs)
        assert_near(native(inputs, held), expected, "float32", 8 * inner * shape[-1])


def test_a_token_has_the_same_bits_among_any_others(isa):
    x, experts, weights, *held = case((41, 70), inner=90)
    together = native([x, experts, weights, *held])
    for row in (0, 17, 40):
        alone = native([x[row : row + 1], experts[row : row + 1], weights[row : row + 1], *held])
        assert together[row].tobytes() == alone[0].tobytes()


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.experts = RoutedExperts()

    def construct(self, x, experts, weights, gate_up, down):
        return self.experts(x, experts, weights, gate_up, down)


def test_dynamic_shapes(mode, reference):
    net = Net()
    _, _, _, *held = map(Tensor, case((1, 24)))
    net.set_inputs(
        Tensor(shape=[None, None, 24], dtype=ms.float32),
        Tensor(shape=[None, 2], dtype=ms.int32),
        Tensor(shape=[None, 2], dtype=ms.float32),
        *held,
    )
    for rows in ((1, 5), (7, 1)):
        inputs = case((*rows, 24))
        found = values(net(*map(Tensor, inputs)))
        assert_near(found, reference.routed_experts(*inputs), "float32", 8 * 9 * 24)


@pytest.mark.parametrize("expert", [-1, EXPERTS])
def test_an_expert_that_there_is_not_is_refused(library, graph_mode, expert):
    inputs = case((3, 8))
    inputs[1][2, 1] = expert
    with refused_by_kernel(f"mindlora routed_experts: row 2 asks for expert {expert} of {EXPERTS}[.]"):
        Net()(*map(Tensor, inputs)).asnumpy()


@pytest.mark.parametrize(
    "at, shape, message",
    [
        (1, (4, 2), "the number of tokens is 3 in one input and 4 in another."),
        (2, (3, 3), "the number of experts of a token is 2 in one input and 3 in another."),
        (3, (EXPERTS, 17, 8), "2 I is 17 in one input and 18 in another."),
        (4, (EXPERTS, 7, 9), "H is 8 in one input and 7 in another."),
    ],
)
def test_refused_shapes(library, graph_mode, at, shape, message):
    inputs = case((3, 8))
    inputs[at] = np.zeros(shape, inputs[at].dtype)
    with refused_by_kernel(f"mindlora routed_experts: {message}"):
        Net()(*map(Tensor, inputs)).asnumpy()


def test_refused_dtypes(library, mode):
    inputs = list(map(Tensor, case((3, 8))))
    inputs[4] = inputs[4].astype(ms.float16)
    with pytest.raises(BackendError) as error:
        Net()(*inputs)
    assert str(error.value) == "routed_experts (cpu): down is Float16 and gate_up is Float32: cast them to one dtype."
