"""What every operator promises, for each table of tests/ops/operators: a test's id begins with the name of its table.

Kernels are called as functions of the CPU library, cells through MindSpore on each path.
"""

import functools
import itertools

import mindspore as ms
import numpy as np
import pytest

from mindlora.core.errors import BackendError
from mindlora.ops import backend
from tests.conftest import in_mode
from tests.ops.contract import arrays_of, assert_gradients, near_in, network_of, of_dtype, open_tensors, tensors_of
from tests.ops.operators import OPERATORS
from tests.support.fewer_cases import each_once
from tests.support.finite_differences import finite_differences
from tests.support.native import assert_near, call, guarded, normal, refused_by_kernel, values
from tests.support.op_paths import PATHS
from tests.support.operator_process import OperatorProcess

KERNELS = [operator for operator in OPERATORS if operator.function]
WITH_GRADIENTS = [operator for operator in OPERATORS if operator.gradients]
MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
# Another dtype for an input of each.
WRONG = {"float32": "float16", "int32": "int64", "int64": "int32", "uint8": "int32", "bfloat16": "float32"}


def worded(part):
    """Returns a part of an id: (3, 37) is 3x37, {"A": (3, 37)} is A=3x37."""
    if isinstance(part, dict):
        return "-".join(f"{name}={worded(shape)}" for name, shape in part.items())
    return "x".join(map(worded, part)) if isinstance(part, tuple) else str(part)


def each(names, rows, indirect=(), left_out=()):
    """Runs a test for each row of values, whose first is an operator; the id says all but those ``left_out``."""
    params = []
    for operator, *others in rows:
        words = [worded(other) for name, other in zip(names.split(", ")[1:], others) if name not in left_out]
        params.append(pytest.param(operator, *others, id="-".join([operator.name, *words])))
    return pytest.mark.parametrize(names, params, indirect=list(indirect))


def paths_of(operator):
    return PATHS if operator.op not in backend.CPU_ONLY else [path for path in PATHS if path == "cpu"]


def each_place_once(operator):
    """Returns "path-mode" of places in which each path and each mode occurs."""
    paths = paths_of(operator)
    return [f"{path}-{mode}" for path, mode in each_once(paths, list(MODES))] if paths else []


def places(operator, dtype):
    """Returns all places for float32; a dtype of 16 bits has each path and mode once."""
    if dtype != "float32":
        return each_place_once(operator)
    return [f"{path}-{mode}" for path, mode in itertools.product(paths_of(operator), MODES)]


@pytest.fixture
def place(request, monkeypatch, library):
    """Forces a path, and runs the test in a mode."""
    path, mode = request.param.split("-")
    monkeypatch.setenv("MINDLORA_BACKEND", path)
    with in_mode(MODES[mode]):
        yield


@functools.lru_cache(maxsize=1)
def case_of(operator, dtype, size):
    """Returns a Case, the same for each refusal in turn."""
    return operator.case(dtype, size)


def each_kernel():
    for operator in KERNELS:
        yield from itertools.product([operator], operator.sizes, operator.dtypes)


@each("operator, size, dtype", each_kernel())
def test_the_kernel_gives_what_the_reference_gives(operator, size, dtype, each_isa):
    case = operator.case(dtype, size)
    inputs, written = list(case.inputs.values()), operator.in_place
    for isa in each_isa(operator.isas):
        found = call(operator.function, inputs, case.expected.shape, case.dtype, in_place=written)
        *after, result = found if written else [found]
        assert_near(result, case.expected, case.dtype, case.terms, isa)
        for actual, wanted in zip(after, case.written):
            np.testing.assert_array_equal(actual, wanted, isa)


def each_with_rows():
    for operator in (operator for operator in KERNELS if operator.rows):
        yield from itertools.product([operator], operator.dtypes, operator.isas)


@each("operator, dtype, isa", each_with_rows(), indirect=["isa"])
def test_a_token_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(operator, dtype, isa, threads):
    case = case_of(operator, dtype, operator.threaded)

    def result_of(rows):
        batch = {name: (case.inputs[name][0][rows], case.inputs[name][1]) for name in operator.rows}
        shape = len(batch[operator.rows[0]][0]), *case.expected.shape[1:]
        return call(operator.function, list({**case.inputs, **batch}.values()), shape, case.dtype)

    together = result_of(slice(None))
    order = np.random.default_rng(0).permutation(len(together))
    for rows in (order, slice(0, 1), slice(7, 8), slice(3, 11), slice(10, None)):
        np.testing.assert_array_equal(result_of(rows), together[rows])
    for count in (1, 3):
        threads(count)
        np.testing.assert_array_equal(result_of(slice(None)), together)


def each_cell():
    for operator in (operator for operator in OPERATORS if operator.cell_sizes):
        for dtype in operator.dtypes:
            yield from itertools.product([operator], [dtype], places(operator, dtype))


@each("operator, dtype, place", each_cell(), indirect=["place"])
def test_the_cell_gives_what_the_reference_gives(operator, dtype, place):
    network, cases = network_of(operator), [operator.case(dtype, size) for size in operator.cell_sizes]
    network.set_inputs(*open_tensors([case.inputs for case in cases]))
    near = near_in(operator, "result")
    for size, case in zip(operator.cell_sizes, cases):
        result = network(*tensors_of(case.inputs))
        assert result.dtype == of_dtype(case.dtype)
        near(values(result), case.expected, case.dtype, case.terms, worded(size))


def each_gradient():
    """Yields the last size with float32 in all places and other dtypes in PyNative; others with each path and mode."""
    for operator in WITH_GRADIENTS:
        *others, last = operator.gradient_sizes[1:]
        yield from itertools.product([operator], others, ["float32"], each_place_once(operator))
        yield from itertools.product([operator], [last], ["float32"], places(operator, "float32"))
        in_pynative = [f"{path}-pynative" for path in paths_of(operator)]
        yield from itertools.product([operator], [last], operator.dtypes[1:], in_pynative)


@each("operator, size, dtype, place", each_gradient(), indirect=["place"])
def test_the_cell_gives_the_gradients_of_the_reference(operator, size, dtype, place):
    assert_gradients(operator, size, dtype)


@each("operator", zip(WITH_GRADIENTS))
def test_the_gradients_of_the_reference_are_those_of_finite_differences(operator):
    inputs = operator.inputs("float32", *operator.gradient_sizes[0])
    arrays = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in arrays_of(inputs)]
    dy = normal(*operator.result_of(arrays).shape, seed=9)
    gradients = operator.gradients_of(dy, arrays)
    for name, array in zip(inputs, arrays):
        if name in gradients:
            wanted = finite_differences(lambda: (operator.result_of(arrays) * dy).sum(), array)
            found = np.reshape(gradients[name], array.shape)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.fixture(scope="module")
def processes(library):
    """The library in processes of their own, by number of threads."""
    found = {threads: OperatorProcess(OMP_NUM_THREADS=str(threads)) for threads in (1, 2)}
    yield found
    for process in found.values():
        process.close()


def run(process, operator, inputs, shape, dtype):
    """Returns the answer of a process, and the tensors after the call: inputs, and a result of a shape and a dtype."""
    empty = np.full(shape, -1 if dtype == "int32" else np.nan, np.float32)
    stored = [(*guarded(array, dtype), dtype) for array, dtype in (*inputs.values(), (empty, dtype))]
    return process.call(operator.function, stored), [inner for _, inner, _ in stored]


def test_every_operator_has_a_table_with_its_kernel():
    assert {operator.op for operator in KERNELS} == set(backend.OPS)
    assert set(backend.OP_TYPES.values()) <= {operator.function for operator in KERNELS}


@each("operator", ([operator] for operator in KERNELS if operator.threaded))
def test_results_do_not_depend_on_the_number_of_threads(processes, operator):
    case = operator.case(operator.dtypes[0], operator.threaded)
    answers, after = zip(
        *(run(processes[threads], operator, case.inputs, case.expected.shape, case.dtype) for threads in (1, 2, 2))
    )
    assert answers[0] == answers[1] == answers[2] and answers[0].code == "code 0"
    assert answers[0].shape == " ".join(map(str, ("shape", *case.expected.shape)))
    dtypes = [dtype for _, dtype in case.inputs.values()]
    assert dtypes[int(answers[0].type.split()[1])] == case.dtype
    for one, two, again in zip(*after):
        assert one.tobytes() == two.tobytes() == again.tobytes()
    assert np.isfinite(after[0][-1]).all()


def refused(process, operator, changes):
    """Calls an operator with other inputs, and returns the answer; nothing is written to any tensor."""
    case = case_of(operator, operator.dtypes[0], operator.refused_size)
    inputs = {**case.inputs, **changes}
    answer, after = run(process, operator, inputs, case.expected.shape, case.dtype)
    for (array, dtype), stored in zip(inputs.values(), after):
        assert stored.tobytes() == guarded(array, dtype)[1].tobytes()
    return answer


def of_shapes(operator, shapes):
    """Returns Inputs of other shapes."""
    right = operator.right()
    return {name: (np.zeros(shape, right[name][0].dtype), right[name][1]) for name, shape in shapes.items()}


def with_value(operator, name, index, value):
    """Returns one of the Inputs with another value in it."""
    array, dtype = operator.right()[name]
    array = array.copy()
    array[index] = value
    return {name: (array, dtype)}


def each_of(field):
    """Yields an operator and what one of its fields holds, for each row of the field."""
    for operator in KERNELS:
        for row in getattr(operator, field):
            yield operator, *row


@each("operator, shapes, message", each_of("refused_shapes"), left_out=["message"])
def test_a_wrong_shape_is_refused_when_a_network_is_compiled_and_when_it_runs(processes, operator, shapes, message):
    answer = refused(processes[1], operator, of_shapes(operator, shapes))
    assert answer.code == f"refused mindlora {operator.op}: {message}"
    # While a network is compiled, the library is not told whether there is a bias.
    assert answer.shape == answer.code or "bias" in shapes


@each("operator, name, index, value, message", each_of("refused_values"), left_out=["message"])
def test_a_wrong_value_is_refused(processes, operator, name, index, value, message):
    answer = refused(processes[2], operator, with_value(operator, name, index, value))
    assert answer.code == f"refused mindlora {operator.op}: {message}" and answer.shape.startswith("shape ")


@each("operator, name, dtype, message", each_of("refused_by_kernel"), left_out=["message"])
def test_a_wrong_dtype_is_refused_by_the_kernel(processes, operator, name, dtype, message):
    answer = refused(processes[2], operator, {name: (operator.right()[name][0], dtype)})
    assert answer.code == f"refused mindlora {operator.op}: {message}" and answer.shape.startswith("shape ")


def refused_dtypes(operator):
    """Yields (name, dtype, message) for each input whose dtype the cell checks."""
    firsts = {name: names[0] for names in operator.alike for name in names}
    for name, (_, right) in operator.right().items():
        called, first = name.split()[-1], firsts.get(name)
        if name == first:
            yield name, "int32", f"{called} is Int32: it must be Float32, Float16 or BFloat16."
        elif first:
            yield name, "float16", f"{called} is Float16 and {first} is Float32: cast them to one dtype."
        elif name not in operator.unchecked:
            wrong, needed = of_dtype(WRONG[right]), of_dtype(right)
            yield name, WRONG[right], f"{called} is {wrong}: it must be {needed}."


def each_refused_dtype():
    """Yields each on each path in PyNative, and in graph mode one of each operator, in its first form."""
    compiled = set()
    for operator in (operator for operator in OPERATORS if operator.cell and operator.refused_size):
        for number, row in enumerate(refused_dtypes(operator)):
            for path in paths_of(operator):
                yield operator, *row, f"{path}-pynative"
            if number == 0 and operator.op not in compiled:
                compiled.add(operator.op)
                yield operator, *row, f"{path}-graph"


@each("operator, name, dtype, message, place", each_refused_dtype(), indirect=["place"], left_out=["message"])
def test_a_wrong_dtype_is_refused_by_the_cell(operator, name, dtype, message, place):
    inputs = operator.right()
    tensors = dict(zip(inputs, tensors_of(inputs)))
    tensors[name] = tensors[name].astype(of_dtype(dtype))
    with pytest.raises(BackendError) as error:
        operator.cell()(*tensors.values())
    assert str(error.value) == f"{operator.op} ({backend.choose(operator.op).path}): {message}"


def each_refusal():
    """Yields the first wrong shape of each operator's first cell, in graph mode, and the first wrong value of each."""
    compiled = set()
    for operator in (operator for operator in KERNELS if operator.cell and paths_of(operator)):
        # nf4_linear has another kernel on an NPU, others have none.
        is_here = PATHS[0] == "cpu" or backend.ASCEND_OP_TYPES[operator.op] == operator.function
        for shapes, message in operator.refused_shapes[:1] if is_here and operator.op not in compiled else ():
            compiled.add(operator.op)
            yield operator, of_shapes(operator, shapes), message, f"{PATHS[0]}-graph"
        # A kernel on an NPU cannot raise.
        for *change, message in operator.refused_values[:1] if PATHS[0] == "cpu" else ():
            yield operator, with_value(operator, *change), message, "cpu-pynative"


@each("operator, changes, message, place", each_refusal(), indirect=["place"], left_out=["changes", "message"])
def test_what_the_kernel_refuses_is_an_error_of_the_cell(operator, changes, message, place):
    with refused_by_kernel() as error:
        operator.cell()(*tensors_of({**operator.right(), **changes})).asnumpy()
    assert f"mindlora {operator.op}: {message}" in str(error.value)
