"""Stand-ins for CANN's libraries: built from what the installed plugin needs, in seconds, into a cache.

Every function that the plugin needs returns 0, except those whose answer matters, which are written by hand in cann/.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Iterable, List, NamedTuple, Sequence, Set, Union

from mindlora.common.atomic import replace_folder
from mindlora.dry_run.plugin_needs import mindspore_folder, plugin_needs
from mindlora.errors import InstallationError

_HERE = pathlib.Path(__file__).resolve().parent
# MindSpore's wheels are built with the older form of std::string.
FLAGS = ("-O1", "-fPIC", "-std=c++17", "-D_GLIBCXX_USE_CXX11_ABI=0")
# All libraries are this one.
_ALL = "libstandins.so"


class StandIns(NamedTuple):
    """Where the stand-ins are.

    Attributes:
        cann (str): The folder that stands for CANN's toolkit.
        libraries (str): The folder with its libraries.
        cores (str): The library that every process on the backend loads first.
        soc (str): The library that tells MindSpore which NPU this is.
        python (str): The folder with CANN's Python package, which MindSpore asks for.
    """

    cann: str
    libraries: str
    cores: str
    soc: str
    python: str


def stand_ins(extra_sources: Sequence[Union[str, pathlib.Path]] = ()) -> StandIns:
    """Returns the stand-ins for the installed MindSpore; builds them if the cache does not hold them.

    Args:
        extra_sources: Paths of C++ or assembler that define more of CANN's functions.

    Raises:
        InstallationError: MindSpore, its Ascend plugin, a C++ compiler or binutils is missing, or the compiler fails.
    """
    mindspore = mindspore_folder()
    sources = [*sorted((_HERE / "cann").glob("*.cc")), *map(pathlib.Path, extra_sources)]
    folder = _cache() / _key(mindspore, sources)
    if not folder.is_dir():
        with replace_folder(str(folder)) as unfinished:
            _build(pathlib.Path(unfinished), mindspore, sources)
    cann = folder / "cann/latest"
    paths = (cann, cann / "lib64", folder / "libcores.so", folder / "libsoc.so", folder / "python")
    return StandIns(*map(str, paths))


def _cache() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mindlora" / "dry_run"


def _key(mindspore: pathlib.Path, sources: Iterable[pathlib.Path]) -> str:
    """Returns the name of the folder for these sources and this MindSpore: another one needs other functions."""
    plugin = next((mindspore / "lib/plugin").glob("libmindspore_ascend.so*")).stat()
    checksum = hashlib.sha256(f"{mindspore} {plugin.st_size} {plugin.st_mtime_ns}".encode())
    code = [_HERE / "plugin_needs.py", _HERE / "stand_ins.py", *(_HERE / "cann").glob("*.h"), *(_HERE / "host").glob("*.cc"), *sources]
    for path in sorted(code):
        checksum.update(path.read_bytes())
    return f"mindspore-{importlib.metadata.version('mindspore')}-{checksum.hexdigest()[:12]}"


def _build(folder: pathlib.Path, mindspore: pathlib.Path, sources: List[pathlib.Path]) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise InstallationError(
            "MindSpore's Ascend backend needs stand-ins for CANN here, and no C++ compiler was found to build them (g++, "
            "or what CXX names): install one."
        )
    cann = folder / "cann/latest"
    libraries = cann / "lib64"
    for path in (libraries, cann / "opp", folder / "python/hccl", folder / "objects"):
        path.mkdir(parents=True)
    # MindSpore 2.7 looks for the libraries beside the folder called latest.
    (folder / "cann/lib64").symlink_to("latest/lib64")
    (folder / "python/hccl/__init__.py").touch()
    (folder / "python/hccl/sys_version.py").write_text('__sys_version__ = "8.5.0"\n')
    needs = plugin_needs(mindspore)
    objects = [folder / f"objects/{number}.o" for number in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda source, target: _compile(compiler, "-c", source, "-o", target), sources, objects))
    rest = folder / "objects/rest.c"
    # Weak: a function of the same name in the sources takes its place.
    rest.write_text("".join(f"__attribute__((weak)) long {name}() {{ return 0; }}\n" for name in sorted(needs.functions)))
    _compile(compiler, "-shared", "-o", libraries / _ALL, *objects, "-x", "c", rest)
    for name in needs.libraries:
        (libraries / name).symlink_to(_ALL)
    _compile(compiler, "-shared", "-o", folder / "libcores.so", _HERE / "host/cores.cc")
    linked = [f"-L{mindspore}/lib", "-l:libmindspore_core.so", "-l:libmindspore_common.so", f"-Wl,-rpath,{mindspore}/lib"]
    _compile(compiler, "-shared", "-o", folder / "libsoc.so", _HERE / "host/soc.cc", "-Wl,--no-as-needed", *linked)
    shutil.rmtree(folder / "objects")


def _compile(compiler: str, *arguments: Union[str, pathlib.Path]) -> None:
    done = subprocess.run([compiler, *FLAGS, *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallationError(f"{compiler} failed on a stand-in for CANN:\n{done.stderr[-2000:]}")
