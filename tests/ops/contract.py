"""What is tested of every operator: a table, an Operator, for each form of it, in tests/ops/operators/<op>.py."""

import dataclasses
from typing import Any, Callable, Dict, Optional, Tuple, Union

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from tests.support.native import DTYPES, ROUNDING, assert_near, normal, tensor, values
from tests.support.op_paths import ISAS
from tests.support.references import reference_of

# The array and the dtype of each input, in the order of the inputs. The last word of a name is what messages call it.
Inputs = Dict[str, Tuple[np.ndarray, str]]
Size = Tuple[Any, ...]
SCALE = (np.float32([0.5]), "float32")


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """One form of an operator. tests/ops/test_contract.py tests what the fields say; whatever is left out is not.

    A size is a tuple: what ``inputs`` takes after a dtype.

    Attributes:
        name (str): The name of the form, which begins the ids of its tests, such as lora_linear_with_bias.
        inputs (function): Returns the Inputs for a dtype and a size.
        terms (function): Returns of how many products of numbers of size 1 a result is the sum, for a size.
        op (str): The operator: a folder in ops/, and what messages begin with. Default: the name.
        expected (function): Returns the result, given the operator's reference.py and the arrays of the inputs, and
            writes to those to which the operator writes. Default: the function of reference.py that is called op.
        result (str): The dtype of the result. Default: the one that ``inputs`` was given.
        dtypes (tuple): What ``inputs`` is given. Default: all three.

        function (str): The function in the CPU library. Default: "", none.
        sizes (tuple): Sizes for the function itself: each of its branches, with odd ends, and nothing at all.
        threaded (tuple): A size that several threads share.
        rows (tuple): Names of the inputs that have a row for each token, where a token has the same bits in any batch.
        in_place (int): To how many of the first inputs it may write. Default: 0.
        isas (tuple): The instruction sets that it has.

        cell (function): Returns the cell.
        call (function): What a user calls in place of the cell. Default: None, for the cell itself.
        cell_sizes (tuple): Sizes for the cell, in one graph, to which the dimensions in which they differ are unknown.
        gradients (tuple or function): The inputs whose gradients <op>_grad of reference.py returns, in order, given
            the gradient of the result and the arrays; or a function that returns them by name, given the reference.py
            too. Of all other inputs the gradient is zero.
        gradient_sizes (tuple): Sizes for them, of which the first, a small one, is for finite differences alone.
        gradient_terms (float): As ``terms``, for the gradients.
        rounds_between (tuple): Names of the gradients, and "result", of which parts are rounded to the dtype before the
            last sum.

        refused_size (tuple): The size that is right, where all that follows is wrong.
        alike (tuple): Names of inputs that must be of one dtype of the three. All other inputs have a dtype of their
            own, which the cell checks too.
        unchecked (tuple): Names of those whose dtype it does not check.
        refused_shapes (tuple): (the shapes that are wrong, by name, the kernel's message).
        refused_values (tuple): (name, index, value, the kernel's message).
        refused_by_kernel (tuple): (name, dtype, the kernel's message).
    """

    name: str
    inputs: Callable[..., Inputs]
    terms: Callable[..., float]
    op: str = ""
    expected: Optional[Callable[..., np.ndarray]] = None
    result: str = ""
    dtypes: Tuple[str, ...] = DTYPES
    function: str = ""
    sizes: Tuple[Size, ...] = ()
    threaded: Size = ()
    rows: Tuple[str, ...] = ()
    in_place: int = 0
    isas: Tuple[str, ...] = tuple(ISAS[:3])
    cell: Optional[Callable[[], nn.Cell]] = None
    call: Optional[Callable[..., Tensor]] = None
    cell_sizes: Tuple[Size, ...] = ()
    gradients: Union[Tuple[str, ...], Callable[..., Dict[str, np.ndarray]]] = ()
    gradient_sizes: Tuple[Size, ...] = ()
    gradient_terms: float = 1
    rounds_between: Tuple[str, ...] = ()
    refused_size: Size = ()
    alike: Tuple[Tuple[str, ...], ...] = ()
    unchecked: Tuple[str, ...] = ()
    refused_shapes: Tuple[Tuple[Dict[str, Size], str], ...] = ()
    refused_values: Tuple[Tuple[str, Any, Any, str], ...] = ()
    refused_by_kernel: Tuple[Tuple[str, str, str], ...] = ()

    def __post_init__(self):
        if not self.op:
            object.__setattr__(self, "op", self.name)

    def result_of(self, arrays):
        """Returns what the reference computes of arrays."""
        reference = reference_of(self.op)
        return self.expected(reference, *arrays) if self.expected else getattr(reference, self.op)(*arrays)

    def gradients_of(self, dy, arrays):
        """Returns the gradients of the reference by name."""
        reference = reference_of(self.op)
        if callable(self.gradients):
            return self.gradients(reference, dy, *arrays)
        return dict(zip(self.gradients, getattr(reference, f"{self.op}_grad")(dy, *arrays)))

    def case(self, dtype, size):
        """Returns the Case for a dtype and a size."""
        inputs = self.inputs(dtype, *size)
        after = arrays_of(inputs)
        expected = self.result_of(after)
        return Case(inputs, after[: self.in_place], expected, self.result or dtype, self.terms(*size))

    def right(self):
        """Returns the Inputs of which some are then made wrong."""
        return self.inputs(self.dtypes[0], *self.refused_size)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        inputs (Inputs): The inputs.
        written (list): The first of them after the call, of an operator that writes to them.
        expected (array): The result.
        dtype (str): The dtype of the result.
        terms (float): Of how many products it is the sum.
    """

    inputs: Inputs
    written: list
    expected: np.ndarray
    dtype: str
    terms: float


def normals(dtype, **shapes):
    """Returns Inputs of normal values, of each shape; each name has values of its own."""
    return {name: (normal(*shape, seed=sum(name.encode()), dtype=dtype), dtype) for name, shape in shapes.items()}


def named(names, arrays, dtypes):
    """Returns Inputs of names, arrays and dtypes."""
    return {name: (array, dtype) for name, array, dtype in zip(names, arrays, dtypes)}


def arrays_of(inputs):
    """Returns copies of the arrays of Inputs."""
    return [array.copy() for array, _ in inputs.values()]


def tensors_of(inputs):
    """Returns the tensors of Inputs."""
    return [tensor(array, dtype) for array, dtype in inputs.values()]


def open_tensors(cases):
    """Returns the tensors of the first of several Inputs, whose dimensions are unknown where the Inputs differ."""
    opened = []
    for together, given in zip(zip(*(inputs.values() for inputs in cases)), tensors_of(cases[0])):
        shapes = np.array([array.shape for array, _ in together])
        shape = [int(sizes[0]) if (sizes == sizes[0]).all() else None for sizes in shapes.T]
        opened.append(Tensor(shape=shape, dtype=given.dtype) if None in shape else given)
    return opened


def without_last(operator, **changes):
    """Returns the form of an operator that has all inputs but the last, such as the one without bias.

    The kernel, which is the same, refuses nothing else.
    """
    last = list(operator.right())[-1]

    def inputs(*size):
        return {name: given for name, given in operator.inputs(*size).items() if name != last}

    alike = tuple(tuple(name for name in names if name != last) for names in operator.alike)
    refused = {"refused_shapes": (), "refused_values": (), "refused_by_kernel": (), "alike": alike}
    return dataclasses.replace(operator, inputs=inputs, threaded=(), rows=(), **refused, **changes)


class Called(nn.Cell):
    """A network that calls a function of an operator."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def construct(self, *inputs):
        return self.function(*inputs)


def network_of(operator):
    """Returns a network in which an operator is called as users call it."""
    return Called(operator.call) if operator.call else operator.cell()


def of_dtype(name):
    """Returns MindSpore's dtype by name."""
    return getattr(ms, name)


class Loss(nn.Cell):
    """sum(y * dy), given the inputs of a cell and dy."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def construct(self, *inputs):
        return (self.cell(*inputs[:-1]) * inputs[-1]).sum()


class GradientOfFirst(nn.Cell):
    """The gradient of Loss for the first input, of any shape: a sensitivity must have a known one."""

    def __init__(self, cell):
        super().__init__()
        self.loss, self.gradient = Loss(cell), ms.ops.GradOperation()

    def construct(self, *inputs):
        return self.gradient(self.loss)(*inputs)


def near_in(operator, name):
    """Returns the assertion for a gradient or the result of an operator."""
    return assert_near_largest if name in operator.rounds_between else assert_near


def assert_near_largest(actual, expected, dtype, terms, what):
    """Asserts as assert_near does, where parts of sums as large as the largest of them were rounded to the dtype."""
    assert actual.shape == expected.shape, what
    near = 4e-7 * terms + 8 * ROUNDING[dtype] * max(1, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=near, err_msg=what)


def assert_gradients(operator, size, dtype):
    """Asserts that a cell gives the gradients of the reference, and of the other inputs zeros."""
    case = operator.case(dtype, size)
    dy = normal(*case.expected.shape, seed=9, dtype=dtype)
    expected = operator.gradients_of(dy, arrays_of(case.inputs))
    # dy is the sensitivity, because a CPU has no bfloat16 product with dy.
    gradient = ms.ops.GradOperation(get_all=True, sens_param=True)(operator.cell())
    found = gradient(*tensors_of(case.inputs), tensor(dy, dtype))
    assert len(found) == len(case.inputs)
    for (name, (array, its_dtype)), of_input in zip(case.inputs.items(), found):
        assert of_input.dtype == of_dtype(its_dtype) and of_input.shape == array.shape, name
        if name in expected:
            wanted = np.reshape(expected[name], array.shape)
            rounded = dtype if name in operator.rounds_between else its_dtype
            near_in(operator, name)(values(of_input), wanted, rounded, operator.gradient_terms, name)
        else:
            assert not values(of_input).any(), name
