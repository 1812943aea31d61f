"""The device on which MindSpore launches kernels: its memory is the process's, its operators are plain loops.

The C++ in device/ is CANN's runtime and some of its operators, that in kernels/ some of the kernels that come with
MindSpore. The project's own operators are a package as CANN's build would make it, of their own host sides and kernels,
which run in the simulator (tests/support/cann_stand_in.py).
"""

import json
import pathlib
from typing import Dict, Iterable, List, NamedTuple, Tuple

from mindlora.core.atomic import replace_folder
from mindlora.run.dry_run.stand_ins import StandIns, built_once, compile_library, return_0, stand_ins
from tests.support import cann_stand_in
from tests.support.ascendc_model import kernels
from tests.support.ascendc_model.model import INCLUDE
from tests.support.cann_stand_in import OPS, ROOT, STAND_IN

_HERE = pathlib.Path(__file__).resolve().parent
# More arguments than any operator has, and as many real ones as processors hand over in registers.
_MOST, _REALS = 60, 8
_NPUS = ("ascend910b", "ascend910_93")


class Device(NamedTuple):
    """What a process needs for launches.

    Attributes:
        stand_ins (StandIns): CANN's libraries.
        environment (dict): Variables that name the operator package and the kernels.
    """

    stand_ins: StandIns
    environment: Dict[str, str]


class Launch(NamedTuple):
    """An operator that was launched.

    Attributes:
        name (str): In CANN, such as aclnnMul, or of a kernel that comes with MindSpore; the project's are not noted.
        computed (bool): Whether its values were computed. Without, its outputs hold what their memory held.
        tensors (tuple of str): Its tensors, with CANN's number of the dtype: "0[2,16]".
    """

    name: str
    computed: bool
    tensors: Tuple[str, ...]


def device() -> Device:
    """Returns the device; builds what the cache does not hold: seconds, or minutes for the project's kernels."""
    sources = sorted((_HERE / "device").glob("*.cc"))
    cann = stand_ins(sources, _operators)
    made_from = [*_contents(_HERE / "kernels"), *_contents(_HERE / "device"), cann.libraries.encode()]
    kernels = built_once("kernels", made_from, lambda folder: _build_kernels(folder, cann))
    made_from = [*_contents(OPS), *_contents(STAND_IN), cann.libraries.encode()]
    package = built_once("operators", made_from, lambda folder: _build_package(folder, cann))
    environment = {
        "LD_PRELOAD": f"{cann.cores}:{kernels}/libkernels.so",
        "ASCEND_CUSTOM_OPP_PATH": f"{package}/vendors/mindlora",
        "MINDLORA_STAND_IN_KERNELS": str(_project_kernels()),
        "MINDLORA_BACKEND": "ascend",
    }
    return Device(cann, environment)


def read_launches(path: pathlib.Path) -> List[Launch]:
    """Returns the launches that a process wrote into a file."""
    launches = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        name, done, tensors = line.split("\t")
        launches.append(Launch(name, done == "computed", tuple(tensors.split())))
    return launches


def _sources(folder: pathlib.Path) -> List[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".h", ".cpp", ".cc"))


def _contents(folder: pathlib.Path) -> List[bytes]:
    return [path.read_bytes() for path in _sources(folder)]


def _operators(functions: Iterable[str]) -> str:
    """Returns the C source of CANN's functions: those of operators hand all their arguments over, others return 0.

    A function reads as many arguments as any has: behind the caller's own lies what else is on its stack.
    """
    arguments, reals = [f"a{n}" for n in range(_MOST)], [f"d{n}" for n in range(_REALS)]
    declared = ", ".join([*(f"uintptr_t {name}" for name in arguments), *(f"double {name}" for name in reals)])
    head = f"""#include <stdint.h>
long StandInAsked(const char*, const uintptr_t*, int, const double*, int, void*);
long StandInLaunched(void*);
#define OPERATOR(name) \\
    __attribute__((weak)) long name##GetWorkspaceSize({declared}) {{ \\
        const uintptr_t arguments[] = {{{", ".join(arguments)}}}; \\
        const double reals[] = {{{", ".join(reals)}}}; \\
        return StandInAsked(#name, arguments, {_MOST}, reals, {_REALS}, __builtin_frame_address(0)); \\
    }} \\
    __attribute__((weak)) long name(void* workspace, uint64_t bytes, void* executor, void* stream) {{ \\
        return StandInLaunched(executor); \\
    }}
"""
    names = set(functions)
    operators = {name for name in names if name.startswith("aclnn") and name + "GetWorkspaceSize" in names}
    operators -= {"aclnnInit", "aclnnFinalize"}
    others = names - operators - {name + "GetWorkspaceSize" for name in operators}
    return head + "".join(f"OPERATOR({name})\n" for name in sorted(operators)) + return_0(sorted(others))


def _build_kernels(folder: pathlib.Path, cann: StandIns) -> None:
    sources = sorted((_HERE / "kernels").glob("*.cc"))
    flags = (f"-L{cann.libraries}", "-lascendcl", f"-Wl,-rpath,{cann.libraries}")
    compile_library(folder / "libkernels.so", sources, *flags)


def _build_package(folder: pathlib.Path, cann: StandIns) -> None:
    """Makes the operator package of the project, as it is installed in CANN."""
    package = folder / "vendors/mindlora"
    operators = cann_stand_in.operators()
    headers = package / "op_api/include"
    headers.mkdir(parents=True)
    for op in operators:
        (headers / f"aclnn_{op}.h").write_text(cann_stand_in.declarations(op))
    source = folder / "aclnn.cpp"
    source.write_text('#include "caller.h"\n' + "".join(map(cann_stand_in.definitions, operators)))
    hosts = [OPS / op / "ascendc/op_host" / f"{op}.cpp" for op in operators]
    includes = (f"-I{OPS}", f"-I{INCLUDE}")
    linked = ("-ldl", "-Wl,--no-as-needed", f"-L{cann.libraries}", "-lascendcl")
    target = package / "op_api/lib/libcust_opapi.so"
    cann_stand_in.library(target, [source, STAND_IN / "caller.cpp", *hosts], *includes, *linked)
    for npu in _NPUS:
        known = package / f"op_impl/ai_core/tbe/config/{npu}"
        known.mkdir(parents=True)
        (known / f"aic-{npu}-ops-info.json").write_text(json.dumps({cann_stand_in.op_type(op): {} for op in operators}))


def _project_kernels() -> pathlib.Path:
    """Returns a folder with the project's kernels for each dtype, compiled for the simulator where they are not yet."""
    paths = {
        f"{op}_{dtype}.so": kernels.build(op, dtype)[0].path
        for op in cann_stand_in.operators()
        for dtype in kernels.ELEMENTS
    }
    folder = ROOT / "build/ascend_backend"
    with replace_folder(str(folder)) as unfinished:
        for name, path in paths.items():
            (pathlib.Path(unfinished) / name).symlink_to(path)
    return folder
