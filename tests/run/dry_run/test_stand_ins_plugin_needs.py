"""What MindSpore's Ascend plugin needs of CANN, as the libraries of the installed wheel say."""

import importlib.machinery
import subprocess
import sys

import pytest

from mindlora.core.errors import InstallationError
from mindlora.run.dry_run import stand_ins


@pytest.fixture(scope="module")
def needs():
    try:
        folder = stand_ins.mindspore_folder()
    except InstallationError as error:
        pytest.skip(str(error))
    return stand_ins.plugin_needs(folder)


def test_undefined_names_and_names_that_are_looked_up_are_found(needs):
    undefined = {"aclrtMallocHost", "_ZN2ge8OperatorC1ERKSs"}
    looked_up = {"aclrtCreateStream", "HcclAllReduce", "aclnnMm", "aclnnMmGetWorkspaceSize"}
    assert needs.functions >= undefined | looked_up
    assert needs.libraries >= {"libascendcl.so", "libhccl.so", "libacl_op_compiler.so"}


def test_what_the_system_or_the_wheel_defines_is_not_asked_for(needs):
    assert not needs.functions & {"malloc", "dlopen", "PyList_New", "_ZdlPvm"}
    assert not [name for name in needs.functions if name.startswith("_ZN9mindspore7session")]
    assert not [name for name in needs.libraries if name.startswith(("libmindspore", "libc.", "libstdc++"))]


def test_a_name_is_asked_for_even_where_this_process_has_it(needs, tmp_path):
    source = tmp_path / "loaded.c"
    source.write_text(stand_ins.return_0(["aclrtCreateStream"]))
    library = tmp_path / "loaded.so"
    stand_ins.compile_library(library, [source])
    code = (
        f"import ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL);"
        "from mindlora.run.dry_run import stand_ins;"
        "print(sorted(stand_ins.plugin_needs(stand_ins.mindspore_folder()).functions))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == str(sorted(needs.functions)).split()


def test_without_mindspore_or_its_plugin_the_error_says_what_to_install(monkeypatch, tmp_path):
    spec = importlib.machinery.ModuleSpec("mindspore", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(stand_ins.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(InstallationError, match="lacks the Ascend plugin .* Install 2.7.2"):
        stand_ins.mindspore_folder()
    monkeypatch.setattr(stand_ins.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InstallationError, match="MindSpore is not installed"):
        stand_ins.mindspore_folder()


def test_without_binutils_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallationError, match="nm or objdump.* is missing: install binutils"):
        stand_ins.plugin_needs(tmp_path)
