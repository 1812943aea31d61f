"""Stand-ins for CANN's libraries: built from what the installed plugin needs, in seconds, into a cache.

Every function that the plugin needs returns 0, except those whose answer matters, which are written by hand in cann/.
"""

import hashlib
import importlib.metadata
import inspect
import os
import pathlib
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Iterable, List, NamedTuple, Sequence, Union

from mindlora.core.atomic import replace_folder
from mindlora.core.errors import InstallationError
from mindlora.run.dry_run.plugin_needs import mindspore_folder, plugin_needs

_HERE = pathlib.Path(__file__).resolve().parent
# MindSpore's wheels are built with the older form of std::string.
_FLAGS = ("-O1", "-fPIC", "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0")
# All of CANN's libraries are this one.
_ALL = "libstandins.so"

# What these kernels read of the chip, a 910B, of the file that CANN has for it.
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
    """Where the stand-ins are.

    Attributes:
        cann (str): The folder that stands for CANN's toolkit.
        libraries (str): The folder with its libraries.
        cores (str): The library that every process on the backend loads first.
        soc (str): The library that tells MindSpore which NPU this is.
        python (str): The folder with CANN's Python package, of which MindSpore asks the version.
    """

    cann: str
    libraries: str
    cores: str
    soc: str
    python: str


def return_0(functions: Iterable[str]) -> str:
    """Returns the C source of functions that return 0."""
    # Weak: a function of the same name in another source takes its place.
    return "".join(f"__attribute__((weak)) long {name}(void) {{ return 0; }}\n" for name in functions)


def stand_ins(more: Sequence[pathlib.Path] = (), rest: Callable[[Iterable[str]], str] = return_0) -> StandIns:
    """Returns the stand-ins for the installed MindSpore; builds them if the cache does not hold them.

    Args:
        more: C++ sources that define more of CANN's functions.
        rest: Makes the C source of the functions that no source defines, from the names of all functions.

    Raises:
        InstallationError: MindSpore, its Ascend plugin, a C++ compiler or binutils is missing, or the compiler fails.
    """
    mindspore = mindspore_folder()
    sources = [*sorted((_HERE / "cann").glob("*.cc")), *more]
    plugin = next((mindspore / "lib/plugin").glob("libmindspore_ascend.so*")).stat()
    code = [_HERE / "plugin_needs.py", _HERE / "stand_ins.py"]
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
    """Returns a folder of the cache, built if it is not there; several processes may ask at once.

    Args:
        name: How its name begins.
        made_from: All that it is built from; another content is another folder.
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
            "MindSpore's Ascend backend needs stand-ins for CANN here, and no C++ compiler was found to build them "
            "(g++, or what CXX names): install one."
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
    # MindSpore asks for the version of this Python package of CANN; te, the other one, it would use, and does without.
    (folder / "python/hccl/__init__.py").touch()
    (folder / "python/hccl/sys_version.py").write_text('__sys_version__ = "8.5.0"\n')
    # What MindSpore compiles to call a custom operator includes this header and needs nothing in it but integers.
    (folder / "cann/latest/include/acl").mkdir(parents=True)
    (folder / "cann/latest/include/acl/acl_base.h").write_text("#include <stddef.h>\n#include <stdint.h>\n")
    # The kernels that come with MindSpore look there for the sizes by which they plan.
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
