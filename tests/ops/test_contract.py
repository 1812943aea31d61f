"""What every operator promises, for each table of tests/ops/operators: a test's id begins with the name of its table.

Kernels are called as functions of the CPU library, cells through MindSpore on each path.
"""

import functools
import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.errors import BackendError
from mindlora.ops import backend
from tests.conftest import in_mode
from tests.ops.contract import arrays_of, network_of, of_dtype, open_tensors, tensors_of
from tests.ops.operators import OPERATORS
from tests.support.fewer_cases import each_once
from tests.support.finite_differences import finite_differences
from tests.support.native import ROUNDING, assert_near, call, guarded, normal, refused_by_kernel, tensor, values
from tests.support.op_paths import PATHS
from tests.support.operator_process import OperatorProcess

KERNELS = [operator for operator in OPERATORS if operator.function]
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}


def sized(size):
    """Returns a size in an id: (3, 37) is 3x37."""
    return "x".join(sized(part) if isinstance(part, tuple) else str(part) for part in size)


def cases(rows):
    """Marks a test to run for each of the tuples, of which an operator is the first, with an id that names them all."""
    params = []
    for operator, *others in rows:
        words = [sized(other) if isinstance(other, tuple) else str(other) for other in others]
        params.append(pytest.param(operator, *others, id="-".join([operator.name, *words])))
    return params


def places(operator, dtype):
    """Returns "path-mode" of each place where a cell is tested: all with float32, each path and mode with others."""
    paths = PATHS if operator.op not in backend.CPU_ONLY else [path for path in PATHS if path == "cpu"]
    if not paths:
        return []
    pairs = itertools.product(paths, MODES) if dtype == "float32" else each_once(paths, list(MODES))
    return [f"{path}-{mode}" for path, mode in pairs]


def each_place_once(operator):
    """Returns places in which each path and each mode occurs."""
    return places(operator, "float16")


@pytest.fixture
def place(request, monkeypatch, library):
    """Forces a path, and runs the test in a mode."""
    path, mode = request.param.split("-")
    monkeypatch.setenv("MINDLORA_BACKEND", path)
    with in_mode(MODES[mode]):
        yield request.param


@functools.lru_cache(maxsize=1)
def case_of(operator, dtype, size):
    """Returns a Case, the same for each instruction set in turn."""
    return operator.case(dtype, size)


def each_kernel():
    for operator in KERNELS:
        for size, dtype, isa in itertools.product(operator.sizes, operator.dtypes, operator.isas):
            yield operator, size, dtype, isa


@pytest.mark.parametrize("operator, size, dtype, isa", cases(each_kernel()), indirect=["isa"])
def test_the_kernel_gives_what_the_reference_gives(operator, size, dtype, isa):
    case = case_of(operator, dtype, size)
    found = call(
        operator.function, list(case.inputs.values()), case.expected.shape, case.dtype, in_place=operator.in_place
    )
    *written, result = found if operator.in_place else [found]
    assert_near(result, case.expected, case.dtype, case.terms)
    for actual, wanted in zip(written, case.written):
        np.testing.assert_array_equal(actual, wanted)


def each_cell():
    for operator in OPERATORS:
        for dtype in operator.dtypes if operator.cell_sizes else ():
            for where in places(operator, dtype):
                yield operator, dtype, where


@pytest.mark.parametrize("operator, dtype, place", cases(each_cell()), indirect=["place"])
def test_the_cell_gives_what_the_reference_gives(operator, dtype, place):
    network, of_sizes = network_of(operator), [operator.case(dtype, size) for size in operator.cell_sizes]
    network.set_inputs(*open_tensors([case.inputs for case in of_sizes]))
    for size, case in zip(operator.cell_sizes, of_sizes):
        result = network(*tensors_of(case.inputs))
        assert result.dtype == of_dtype(case.dtype)
        near = near_in(operator, "result")
        near(values(result), case.expected, case.dtype, case.terms, sized(size))


def near_in(operator, name):
    """Returns the assertion for a gradient or the result of an operator."""
    return assert_near_largest if name in operator.rounds_between else assert_near


def assert_near_largest(actual, expected, dtype, terms, what):
    """Asserts as assert_near does, where parts of sums as large as the largest of them were rounded to the dtype."""
    assert actual.shape == expected.shape, what
    near = 4e-7 * terms + 8 * ROUNDING[dtype] * max(1, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=near, err_msg=what)


def each_gradient():
    """Yields the last size with each dtype in each place, and the others with float32, each path and mode once."""
    for operator in (operator for operator in OPERATORS if operator.gradients):
        *others, last = operator.gradient_sizes
        for size, where in itertools.product(others, each_place_once(operator)):
            yield operator, size, "float32", where
        for dtype in operator.dtypes:
            for where in places(operator, dtype):
                yield operator, last, dtype, where


@pytest.mark.parametrize("operator, size, dtype, place", cases(each_gradient()), indirect=["place"])
def test_the_cell_gives_the_gradients_of_the_reference(operator, size, dtype, place):
    inputs = operator.case(dtype, size).inputs
    dy = normal(*operator.case(dtype, size).expected.shape, seed=9, dtype=dtype)
    expected = operator.gradients(operator.reference, dy, *arrays_of(inputs))
    # dy is the sensitivity, because a CPU has no bfloat16 product with dy.
    gradient = ms.ops.GradOperation(get_all=True, sens_param=True)(operator.cell())
    found = gradient(*tensors_of(inputs), tensor(dy, dtype))
    assert len(found) == len(inputs)
    for (name, (array, its_dtype)), of_input in zip(inputs.items(), found):
        assert of_input.dtype == of_dtype(its_dtype) and of_input.shape == array.shape, name
        if name not in expected:
            assert not values(of_input).any(), name
            continue
        wanted = np.reshape(expected[name], array.shape)
        near_in(operator, name)(values(of_input), wanted, its_dtype, operator.gradient_terms, name)


WITH_GRADIENTS = [(operator,) for operator in OPERATORS if operator.gradients]


@pytest.mark.parametrize("operator", cases(WITH_GRADIENTS))
def test_the_gradients_of_the_reference_are_those_of_finite_differences(operator):
    inputs = operator.inputs("float32", *operator.gradient_sizes[0])
    arrays = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in arrays_of(inputs)]
    dy = normal(*operator.expected(operator.reference, *arrays).shape, seed=9)
    gradients = operator.gradients(operator.reference, dy, *arrays)

    def loss():
        return (operator.expected(operator.reference, *arrays) * dy).sum()

    for name, array in zip(inputs, arrays):
        if name in gradients:
            wanted, found = finite_differences(loss, array), np.reshape(gradients[name], array.shape)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.fixture(scope="module")
def processes(library):
    """The library in processes of their own, by number of threads."""
    found = {threads: OperatorProcess(OMP_NUM_THREADS=str(threads)) for threads in (1, 2)}
    yield found
    for process in found.values():
        process.close()


def run(process, operator, inputs, result):
    """Returns the answer of a process, and the tensors after the call: inputs, and a result of a shape and a dtype."""
    empty = np.full(result[0], -1 if result[1] == "int32" else np.nan, np.float32)
    stored = [(*guarded(array, dtype), dtype) for array, dtype in (*inputs.values(), (empty, result[1]))]
    return process.call(operator.function, stored), [inner for _, inner, _ in stored]


def test_every_operator_has_a_table_and_a_kernel_in_it():
    assert {operator.op for operator in KERNELS} == set(backend.OPS)
    assert set(backend.OP_TYPES.values()) <= {operator.function for operator in KERNELS}


@pytest.mark.parametrize("operator", cases((kernel,) for kernel in KERNELS if kernel.threaded))
def test_results_do_not_depend_on_the_number_of_threads(processes, operator):
    case = operator.case(operator.dtypes[0], operator.threaded)
    result = case.expected.shape, case.dtype
    answers, after = zip(*(run(processes[threads], operator, case.inputs, result) for threads in (1, 2, 2)))
    assert answers[0] == answers[1] == answers[2] and answers[0].code == "code 0"
    assert answers[0].shape == " ".join(map(str, ("shape", *case.expected.shape)))
    dtypes = [dtype for _, dtype in case.inputs.values()]
    assert dtypes[int(answers[0].type.split()[1])] == case.dtype
    for tensors in zip(*after):
        assert tensors[0].tobytes() == tensors[1].tobytes() == tensors[2].tobytes()
    assert np.isfinite(after[0][-1]).all()


def refused(process, operator, changes):
    """Calls an operator with other inputs, and returns the answer; nothing is written to any tensor."""
    inputs = {**operator.inputs(operator.dtypes[0], *operator.refused_size), **changes}
    result = (3, 5), operator.result or operator.dtypes[0]
    answer, after = run(process, operator, inputs, result)
    for (array, dtype), stored in zip(inputs.values(), after):
        assert stored.tobytes() == guarded(array, dtype)[1].tobytes()
    return answer


def zeros(operator, shapes):
    """Returns Inputs of other shapes."""
    inputs = operator.inputs(operator.dtypes[0], *operator.refused_size)
    return {name: (np.zeros(shape, inputs[name][0].dtype), inputs[name][1]) for name, shape in shapes.items()}


def changed(operator, name, index, value):
    """Returns one of the Inputs with another value in it."""
    array, dtype = operator.inputs(operator.dtypes[0], *operator.refused_size)[name]
    array = array.copy()
    array[index] = value
    return {name: (array, dtype)}


def each_refused_shape():
    for operator in KERNELS:
        for shapes, message in operator.refused_shapes:
            words = "-".join(f"{name}={sized(shape)}" for name, shape in shapes.items())
            yield pytest.param(operator, shapes, message, id=f"{operator.name}-{words}")


@pytest.mark.parametrize("operator, shapes, message", each_refused_shape())
def test_a_wrong_shape_is_refused_when_a_network_is_compiled_and_when_it_runs(processes, operator, shapes, message):
    answer = refused(processes[1], operator, zeros(operator, shapes))
    assert answer.code == f"refused mindlora {operator.op}: {message}"
    # A network that is compiled does not say whether there is a bias.
    assert answer.shape == answer.code or "bias" in shapes


def each_refused(field):
    for operator in OPERATORS:
        for name, *others, message in getattr(operator, field):
            words = "=".join(map(str, (name, *others)))
            yield pytest.param(operator, name, *others, message, id=f"{operator.name}-{words}")


@pytest.mark.parametrize("operator, name, index, value, message", each_refused("refused_values"))
def test_a_wrong_value_is_refused(processes, operator, name, index, value, message):
    answer = refused(processes[2], operator, changed(operator, name, index, value))
    assert answer.code == f"refused mindlora {operator.op}: {message}" and answer.shape.startswith("shape ")


@pytest.mark.parametrize("operator, name, dtype, message", each_refused("refused_by_kernel"))
def test_a_wrong_dtype_is_refused_by_the_kernel(processes, operator, name, dtype, message):
    array, _ = operator.inputs(operator.dtypes[0], *operator.refused_size)[name]
    answer = refused(processes[2], operator, {name: (array, dtype)})
    assert answer.code == f"refused mindlora {operator.op}: {message}" and answer.shape.startswith("shape ")


def each_refused_dtype():
    for param in each_refused("refused_dtypes"):
        for where in each_place_once(param.values[0]):
            yield pytest.param(*param.values, where, id=f"{param.id}-{where}")


@pytest.mark.parametrize("operator, name, dtype, message, place", each_refused_dtype(), indirect=["place"])
def test_a_wrong_dtype_is_refused_by_the_cell(operator, name, dtype, message, place):
    inputs = operator.inputs(operator.dtypes[0], *operator.refused_size)
    tensors = dict(zip(inputs, tensors_of(inputs)))
    tensors[name] = tensors[name].astype(of_dtype(dtype))
    with pytest.raises(BackendError) as error:
        operator.cell()(*tensors.values())
    assert str(error.value) == f"{operator.op} ({place.split('-')[0]}): {message}"


def each_refusal_of_a_cell():
    """Of each cell one refusal of a shape, in graph mode, and one of a value where there is one."""
    for operator in (operator for operator in KERNELS if operator.cell and places(operator, "float32")):
        if operator.refused_shapes:
            shapes, message = operator.refused_shapes[0]
            yield operator, zeros(operator, shapes), message, "graph"
        if operator.refused_values and PATHS[0] == "cpu":  # a kernel on an NPU cannot raise
            *change, message = operator.refused_values[0]
            yield operator, changed(operator, *change), message, "pynative"


@pytest.mark.parametrize(
    "operator, changes, message, place",
    [
        pytest.param(operator, changes, message, f"{PATHS[0]}-{mode}", id=f"{operator.name}-{mode}")
        for operator, changes, message, mode in each_refusal_of_a_cell()
    ],
    indirect=["place"],
)
def test_what_the_kernel_refuses_is_an_error_of_the_cell(operator, changes, message, place):
    inputs = {**operator.inputs(operator.dtypes[0], *operator.refused_size), **changes}
    with refused_by_kernel() as error:
        Tensor(operator.cell()(*tensors_of(inputs))).asnumpy()
    assert f"mindlora {operator.op}: {message}" in str(error.value)
