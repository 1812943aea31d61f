"""Stand-ins for CANN's libraries: built in seconds, from the needs of the installed plugin, into a cache.

Every function that the plugin needs returns 0, except those whose result matters, which are written by hand in cann/.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import pathlib
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, FrozenSet, Iterable, Iterator, List, NamedTuple, Sequence, Set, Union

from mindlora.core.atomic import replace_folder
from mindlora.core.errors import InstallationError

# The needs of MindSpore's Ascend plugin, read from the libraries of the installed wheel.
#
# CANN must define each name that a library leaves undefined and the wheel does not define. A name that a library
# looks up at run time (dlsym, dlopen) is a string in it. So there is no list of CANN's names to maintain here.

# Parts of the plugin that stay unloaded, as on an NPU without the packages that they need: ATB is a package of
# its own and DVPP decodes images. Only CANN loads the others.
_LEFT_OUT = re.compile("atb_kernels|dvpp|custom_aicpu_ops|cpu_kernels|op_tiling|op_proto|op_kernels")
# Prefixes of CANN's C functions. A pattern with one prefix is ten times as fast as one with six.
_BEGINNINGS = (b"acl", b"Hccl", b"Hcom", b"hal", b"Msprof", b"rt")
# MindSpore loads these at run time; it works without other libraries that it tries to load.
_LOADED_LATER = re.compile(rb"(libacl_[a-z_]+\.so)(?=\0)")
# The second of an operator's two functions; MindSpore derives its name from the first.
_WORKSPACE = "GetWorkspaceSize"
# Libraries that are not CANN's, and the prefix of Python's names. Libraries loaded in this process do not count: one
# may be a stand-in for CANN.
_SYSTEM = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1")
_PYTHON = ("Py", "_Py")


class PluginNeeds(NamedTuple):
    """The plugin's needs of CANN.

    Attributes:
        functions (frozenset of str): Names of functions, mangled for C++.
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
    """Returns the needs of the Ascend plugin of the MindSpore in the folder ``mindspore``.

    Raises:
        InstallationError: nm, a part of binutils, is missing.
    """
    if shutil.which("nm") is None or shutil.which("objdump") is None:
        raise InstallationError("nm or objdump, which list what a library needs, is missing: install binutils.")
    plugin = [path for path in _libraries(mindspore) if not _LEFT_OUT.search(str(path))]
    functions = _symbols(plugin, "U")
    libraries = set(re.findall(r"NEEDED +(\S+)", _output("objdump", "-p", *plugin)))
    for path in plugin:
        # The plugin's kernels, the largest files of all, do not look up names.
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
    # The system's libraries have a version after .so, CANN's have none.
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


_HERE = pathlib.Path(__file__).resolve().parent
# MindSpore's wheels are built with the older form of std::string.
_FLAGS = ("-O1", "-fPIC", "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0")
# This one stands for all of CANN's libraries.
_ALL = "libstandins.so"

# The properties of the chip, a 910B, that these kernels read from CANN's file.
_CHIP = """[version]
SoC_version=Ascend910B1
Short_SoC_version=Ascend910B
AIC_version=AIC-C-220
[SoCInfo]
ai_core_cnt=24
cube_core_cnt=24
vector_core_cnt=48
ai_cpu_cnt=6
memory_size=68719476736
l2_size=201326592
[AICoreSpec]
cube_m_size=16
cube_n_size=16
cube_k_size=16
l0_a_size=65536
l0_b_size=65536
l0_c_size=131072
l1_size=524288
ub_size=196608
ubblock_size=32
[VectorCoreSpec]
ub_size=196608
ubblock_size=32
"""


class StandIns(NamedTuple):
    """The paths of the stand-ins.

    Attributes:
        cann (str): The folder that stands for CANN's toolkit.
        libraries (str): The folder with its libraries.
        cores (str): The library that every process on the backend loads first.
        soc (str): The library that reports the model of the NPU to MindSpore.
        python (str): The folder with CANN's Python package, whose version MindSpore reads.
    """

    cann: str
    libraries: str
    cores: str
    soc: str
    python: str


def return_0(functions: Iterable[str]) -> str:
    """Returns the C source of functions that return 0."""
    # Weak: a function of the same name in another source replaces it.
    return "".join(f"__attribute__((weak)) long {name}(void) {{ return 0; }}\n" for name in functions)


def stand_ins(more: Sequence[pathlib.Path] = (), rest: Callable[[Iterable[str]], str] = return_0) -> StandIns:
    """Returns the stand-ins for the installed MindSpore, building them if the cache lacks them.

    Args:
        more: C++ sources that define more of CANN's functions.
        rest: Returns the C source of the functions that no source defines, given the names of all functions.

    Raises:
        InstallationError: MindSpore, its Ascend plugin, a C++ compiler or binutils is missing, or the compiler fails.
    """
    mindspore = mindspore_folder()
    sources = [*sorted((_HERE / "cann").glob("*.cc")), *more]
    plugin = next((mindspore / "lib/plugin").glob("libmindspore_ascend.so*")).stat()
    code = [_HERE / "stand_ins.py"]
    code += [*(_HERE / "cann").glob("*.h"), *(_HERE / "host").glob("*.cc")]
    made_from = [
        f"{mindspore} {plugin.st_size} {plugin.st_mtime_ns} {inspect.getsource(rest)}".encode(),
        *(path.read_bytes() for path in [*sorted(code), *sources]),
    ]
    name = f"mindspore-{importlib.metadata.version('mindspore')}"
    folder = built_once(name, made_from, lambda new: _build(new, mindspore, sources, rest))
    cann = folder / "cann/latest"
    paths = (cann, cann / "lib64", folder / "libcores.so", folder / "libsoc.so", folder / "python")
    return StandIns(*map(str, paths))


def built_once(name: str, made_from: Iterable[bytes], build: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns a folder of the cache, building it if it is missing; several processes may call this at once.

    Args:
        name: Prefix of its name.
        made_from: All its sources; other contents give another folder.
        build: Fills an empty folder.
    """
    checksum = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:12]
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "mindlora" / "dry_run" / f"{name}-{checksum}"
    if not folder.is_dir():
        with replace_folder(str(folder)) as unfinished:
            build(pathlib.Path(unfinished))
    return folder


def compile_library(target: pathlib.Path, sources: Sequence[pathlib.Path], *flags: Union[str, pathlib.Path]) -> None:
    """Compiles C++ and C into a shared library.

    Raises:
        InstallationError: There is no compiler, or it fails; the message quotes it.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise InstallationError(
            "MindSpore's Ascend backend needs stand-ins for CANN here, but no C++ compiler (g++, or what CXX names) "
            "was found to build them. Install one."
        )

    def run(*arguments: Union[str, pathlib.Path]) -> None:
        done = subprocess.run([compiler, *map(str, arguments)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise InstallationError(
                f"{compiler} cannot compile the stand-ins for CANN. Install g++ 9 or newer, or name a compiler with "
                f"CXX. It says:\n{done.stderr[-2000:]}"
            )

    objects = [target.with_name(f"{target.stem}.{number}.o") for number in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, made: run(*_language(source), "-c", source, "-o", made), sources, objects))
    run("-shared", "-o", target, *objects, *flags)
    for made in objects:
        made.unlink()


def _language(source: pathlib.Path) -> Sequence[str]:
    return ("-x", "c", "-O1", "-fPIC") if source.suffix == ".c" else _FLAGS


def _build(
    folder: pathlib.Path, mindspore: pathlib.Path, sources: List[pathlib.Path], rest: Callable[[Iterable[str]], str]
) -> None:
    libraries = folder / "cann/latest/lib64"
    for path in (libraries, folder / "cann/latest/opp", folder / "python/hccl"):
        path.mkdir(parents=True)
    # MindSpore 2.7 looks for the libraries beside the folder called latest.
    (folder / "cann/lib64").symlink_to("latest/lib64")
    # MindSpore reads the version of this Python package of CANN; the other one, te, is optional.
    (folder / "python/hccl/__init__.py").touch()
    (folder / "python/hccl/sys_version.py").write_text('__sys_version__ = "8.5.0"\n')
    # MindSpore's code that calls a custom operator includes this header and needs only integers from it.
    (folder / "cann/latest/include/acl").mkdir(parents=True)
    (folder / "cann/latest/include/acl/acl_base.h").write_text("#include <stddef.h>\n#include <stdint.h>\n")
    # MindSpore's own kernels read the sizes for their plans there.
    (folder / "cann/latest/x86_64-linux/data/platform_config").mkdir(parents=True)
    (folder / "cann/latest/x86_64-linux/data/platform_config/Ascend910B1.ini").write_text(_CHIP)
    needs = plugin_needs(mindspore)
    others = folder / "rest.c"
    others.write_text(rest(sorted(needs.functions)))
    compile_library(libraries / _ALL, [*sources, others])
    for name in needs.libraries:
        (libraries / name).symlink_to(_ALL)
    compile_library(folder / "libcores.so", [_HERE / "host/cores.cc"])
    own = ["-Wl,--no-as-needed", f"-L{mindspore}/lib", "-l:libmindspore_core.so", "-l:libmindspore_common.so"]
    compile_library(folder / "libsoc.so", [_HERE / "host/soc.cc"], *own, f"-Wl,-rpath,{mindspore}/lib")
