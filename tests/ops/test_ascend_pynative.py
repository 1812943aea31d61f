"""How PyNative calls the Ascend kernels: what is picked where a module is there, and the module's source as far as it
can be checked without CANN. Nothing here runs on an NPU.
"""

import re
import subprocess
import sysconfig

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.ops import CustomOpBuilder

from mindlora.ops import LoraDelta, ascend, build_pynative
from mindlora.ops.build import LIBRARY
from mindlora.ops.operator_cell import CpuKernel
from tests.support import cann_stand_in

NEW_ENOUGH = ascend.age_problem() is None
# A module whose function returns what it was told and given.
FAKE = r"""
#include <Python.h>
static PyObject *library;
static PyObject *use_library(PyObject *self, PyObject *path) { Py_INCREF(path); library = path; Py_RETURN_NONE; }
static PyObject *LoraDelta(PyObject *self, PyObject *args) { return Py_BuildValue("sOO", "LoraDelta", library, args); }
static PyMethodDef methods[] = {
    {"use_library", use_library, METH_O, ""}, {"LoraDelta", LoraDelta, METH_VARARGS, ""}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "mindlora_pynative", "", -1, methods};
PyMODINIT_FUNC PyInit_mindlora_pynative(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyModule_AddIntConstant(module, "version", VERSION);
    return module;
}
"""


@pytest.fixture
def module(monkeypatch, tmp_path):
    """A function that builds a fake module where mindlora looks for one, for a MindSpore that is new enough."""
    path = tmp_path / "mindlora_pynative.so"
    monkeypatch.setattr(ascend, "PYNATIVE_PATH", str(path))
    monkeypatch.setattr(ms, "__version__", "2.9.0")

    def make(version=ascend._MODULE_VERSION):
        (tmp_path / "fake.c").write_text(FAKE)
        include = sysconfig.get_path("include")
        command = ["gcc", "-shared", "-fPIC", f"-I{include}", f"-DVERSION={version}", "-o", str(path)]
        subprocess.run([*command, str(tmp_path / "fake.c")], check=True)
        return str(path)

    make.path = path
    return make


def assert_custom(reason):
    assert ascend.describe(LIBRARY) == f"called by ops.Custom, in PyNative too: {reason}"
    assert ascend.pynative_function("LoraDelta", LIBRARY) is None


def test_a_module_is_taken_and_told_where_shapes_are_inferred(module):
    path = module()
    wanted = f"called by ops.Custom in graph mode, and in PyNative by AclnnOpRunner, {path}"
    assert ascend.describe(LIBRARY) == wanted
    assert ascend.pynative_function("LoraDelta", LIBRARY)(1, 2) == ("LoraDelta", LIBRARY, (1, 2))


def test_without_a_module_ops_custom_serves_both_modes(module):
    assert_custom(f"{module.path} is missing (scripts/build_ascend.sh builds it)")


def test_an_old_mindspore_has_ops_custom_even_where_a_module_is(module, monkeypatch):
    module()
    monkeypatch.setattr(ms, "__version__", "2.8.1")
    assert_custom("MindSpore is 2.8.1, but AclnnOpRunner is used from 2.9 on")


def test_a_module_that_cannot_be_loaded_is_left_and_the_report_says_why(module):
    module.path.write_text("no module")
    found = ascend.describe(LIBRARY)
    assert found.startswith(f"called by ops.Custom, in PyNative too: {module.path} cannot be loaded: ")


def test_a_module_of_another_version_of_mindlora_is_left(module):
    path = module(version=0)
    assert_custom(f"{path} is from another version of mindlora (0, not {ascend._MODULE_VERSION})")


def test_a_graph_holds_the_primitive_and_only_pynative_calls_it_as_a_function(monkeypatch, mode, library):
    """What AscendKernel rests on, shown with the CPU's kernel."""

    class Refusing(CpuKernel):
        def __call__(self, *inputs):
            raise AssertionError("called as a function")

    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    cell = LoraDelta()
    cell.kernel = Refusing("LoraDelta", 5)
    inputs = [Tensor(np.ones(shape, np.float32)) for shape in ((2, 3), (2, 4), (1, 4), (3, 1), ())]
    if mode == ms.GRAPH_MODE:
        assert (cell(*inputs).asnumpy() == 5).all()
    else:
        with pytest.raises(AssertionError, match="called as a function"):
            cell(*inputs)


def source():
    with open(build_pynative.SOURCE, encoding="utf-8") as file:
        return file.read()


@pytest.mark.parametrize("op_type", sorted(ascend.SIGNATURES))
def test_the_source_calls_each_kernel_with_its_inputs_in_order_and_then_its_output(op_type):
    inputs = list(ascend.SIGNATURES[op_type])
    body = re.search(rf"Tensor {op_type}\(([^)]*)\)\s*{{(.*?)\n}}", source(), re.S)
    assert re.findall(r"const Tensor& (\w+)", body[1]) == inputs
    listed = r",\s*".join(inputs)
    assert re.search(rf'Call call\("{op_type}", {{{listed}}}, \w+\);', body[2])
    assert re.search(rf"LAUNCH_ACLNN_FUNC\(aclnn{op_type},\s*{listed},\s*call\.output\(\)\)", body[2])
    assert f'm.def("{op_type}", PYBOOST_CALLER(1, mindlora::{op_type}));' in source()


def test_source_and_python_agree_on_the_version():
    assert f"constexpr int kVersion = {ascend._MODULE_VERSION};" in source()


@pytest.mark.skipif(not NEW_ENOUGH, reason="the source is written to the headers of MindSpore 2.9")
def test_the_source_compiles_against_the_headers_of_mindspore(monkeypatch, tmp_path):
    cann_stand_in.write_headers_for_mindspore(tmp_path / "include")
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path / "opp"))
    builder = CustomOpBuilder("mindlora_pynative", build_pynative.SOURCE, backend="Ascend")
    includes = [*builder.get_include_paths(), sysconfig.get_path("include")]
    command = ["g++", "-fsyntax-only", "-w", *builder.get_cflags(), *(f"-I{path}" for path in includes)]
    done = subprocess.run([*command, build_pynative.SOURCE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]


def test_what_is_missing_for_a_build_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(ms, "__version__", "2.7.2")
    with pytest.raises(SystemExit) as stop:
        build_pynative.main()
    assert stop.value.code == (
        "error: MindSpore is 2.7.2, but AclnnOpRunner is used from 2.9 on. In PyNative ops.Custom calls the kernels, "
        "as in graph mode."
    )
    monkeypatch.setattr(ms, "__version__", "2.9.0")
    monkeypatch.setattr(build_pynative, "SOURCE", "/nowhere/pynative.cc")
    with pytest.raises(SystemExit, match="error: /nowhere/pynative.cc is missing: build in a checkout of mindlora[.]"):
        build_pynative.main()


@pytest.mark.skipif(not NEW_ENOUGH, reason="MindSpore 2.7 names another problem first")
def test_a_build_without_cann_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(build_pynative, "PYNATIVE_PATH", str(tmp_path / "lib/mindspore/mindlora_pynative.so"))
    monkeypatch.delenv("ASCEND_OPP_PATH", raising=False)
    with pytest.raises(SystemExit, match="ASCEND_OPP_PATH"):
        build_pynative.main()
    assert not list((tmp_path / "lib/mindspore").iterdir())
