"""What MindSpore's Ascend plugin needs of CANN, read from the libraries of the installed wheel.

CANN must define each name that a library leaves undefined and the wheel does not define itself. A name that a library
looks up while it runs (dlsym, dlopen) is a string in it. So no list of CANN's names has to be kept here.
"""

import ctypes
import importlib.util
import pathlib
import re
import shutil
import subprocess
from typing import FrozenSet, Iterator, List, NamedTuple, Sequence, Set, Union

from mindlora.core.errors import InstallationError

# Parts of the plugin that stay unloaded, as on an NPU whose owner did not install what they need: ATB is a package of
# its own and DVPP decodes images. The others are loaded by CANN alone.
_LEFT_OUT = re.compile("atb_kernels|dvpp|custom_aicpu_ops|cpu_kernels|op_tiling|op_proto|op_kernels")
# How the names of CANN's C functions begin. A pattern with one beginning is ten times as fast as one with six.
_BEGINNINGS = (b"acl", b"Hccl", b"Hcom", b"hal", b"Msprof", b"rt")
# MindSpore loads these while it runs; libraries of others that it tries to load, it does without.
_LOADED_LATER = re.compile(rb"(libacl_[a-z_]+\.so)(?=\0)")
# The second function of an operator's two; MindSpore puts its name together from that of the first.
_WORKSPACE = "GetWorkspaceSize"
# Libraries that are not CANN's, and how Python's names begin. What this process has loaded does not count: it may hold
# a stand-in for CANN.
_SYSTEM = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1")
_PYTHON = ("Py", "_Py")


class PluginNeeds(NamedTuple):
    """What the plugin needs of CANN.

    Attributes:
        functions (frozenset of str): Names of functions, those of C++ as the linker sees them.
        libraries (frozenset of str): File names of libraries, such as libascendcl.so.
    """

    functions: FrozenSet[str]
    libraries: FrozenSet[str]


def mindspore_folder() -> pathlib.Path:
    """Returns the folder of the installed MindSpore, without importing it.

    Raises:
        InstallationError: MindSpore is not installed, or its wheel lacks the Ascend plugin.
    """
    spec = importlib.util.find_spec("mindspore")
    if spec is None or not spec.submodule_search_locations:
        raise InstallationError("MindSpore is not installed. Install a version that docs/installation.md names.")
    folder = pathlib.Path(spec.submodule_search_locations[0])
    if not list((folder / "lib/plugin").glob("libmindspore_ascend.so*")):
        raise InstallationError(
            f"The MindSpore in {folder} lacks the Ascend plugin (lib/plugin/libmindspore_ascend.so), so its Ascend "
            "backend cannot run here. Install 2.7.2, 2.9.0 or 2.10.0 from the package index: those wheels hold it."
        )
    return folder


def plugin_needs(mindspore: pathlib.Path) -> PluginNeeds:
    """Returns what the Ascend plugin of the MindSpore in the folder ``mindspore`` needs of CANN.

    Raises:
        InstallationError: nm, a part of binutils, is missing.
    """
    if shutil.which("nm") is None or shutil.which("objdump") is None:
        raise InstallationError("nm or objdump, which list what a library needs, is missing: install binutils.")
    plugin = [path for path in _libraries(mindspore) if not _LEFT_OUT.search(str(path))]
    functions = _symbols(plugin, "U")
    libraries = set(re.findall(r"NEEDED +(\S+)", _output("objdump", "-p", *plugin)))
    for path in plugin:
        # The kernels that come with the plugin, the largest files of all, look nothing up.
        if "ms_kernels_" not in str(path):
            content = path.read_bytes()
            functions.update(_looked_up(content))
            libraries.update(name.decode() for name in _LOADED_LATER.findall(content))
    operators = {name.removesuffix(_WORKSPACE) for name in functions if name.startswith("aclnn")}
    functions |= operators | {name + _WORKSPACE for name in operators}
    wheel = [*(mindspore / "lib").glob("*.so*"), *_libraries(mindspore)]
    functions -= _symbols([path for path in wheel if not _LEFT_OUT.search(str(path))], "TWVBDRui")
    libraries -= {path.name for path in wheel}
    own = frozenset(name for name in functions if not _is_of_the_system(name))
    # The system's libraries have a version behind the .so, CANN's have none.
    return PluginNeeds(own, frozenset(name for name in libraries if name.endswith(".so")))


def _libraries(mindspore: pathlib.Path) -> List[pathlib.Path]:
    folder = mindspore / "lib/plugin"
    return sorted({*folder.glob("*ascend*.so*"), *(folder / "ascend").rglob("*.so*")})


def _output(program: str, *arguments: Union[str, pathlib.Path]) -> str:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def _symbols(libraries: Sequence[pathlib.Path], kinds: str) -> Set[str]:
    """Returns the names in the libraries' symbol tables that nm marks with one of ``kinds``."""
    return set(re.findall(rf"^[0-9a-f ]* [{kinds}] ([^@\s]+)", _output("nm", "-D", *libraries), re.MULTILINE))


def _looked_up(content: bytes) -> Iterator[str]:
    """Yields the strings in a library that look like names of CANN's C functions."""
    for beginning in _BEGINNINGS:
        for name in re.findall(rb"\0(" + beginning + rb"[a-z]*[A-Z][A-Za-z0-9_]*)(?=\0)", content):
            yield name.decode()


def _is_of_the_system(function: str) -> bool:
    return function.startswith(_PYTHON) or any(hasattr(ctypes.CDLL(name), function) for name in _SYSTEM)
