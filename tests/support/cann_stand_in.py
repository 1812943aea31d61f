"""A folder that scripts/check_aclnn.sh takes for CANN with an NPU, and an operator package in it.

The C++ in cann_stand_in/ is the device: memory is this process's, the operators' own host sides (op_host) check and
plan, and their kernels run in the simulator. The aclnn functions are made from the hosts' definitions by CANN's rules:
inputs, then outputs; one output is called out; an output with the name of an input is that input.
"""

import pathlib
import re
import subprocess
from typing import Dict, List, Sequence, Tuple

from tests.support.ascendc_model.model import INCLUDE

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPS = ROOT / "ops"
STAND_IN = pathlib.Path(__file__).resolve().parent / "cann_stand_in"
# The tensor whose dtype a kernel is compiled for.
ELEMENTS = {"multi_lora_slot_write": "pool", "nf4_dequantize": "like"}
# As the simulator numbers them.
KERNEL_TYPES = ("AIV_ONLY", "AIC_ONLY", "MIX_AIV_1_0", "MIX_AIC_1_0", "MIX_AIC_1_1", "MIX_AIC_1_2")
# Those of CANN that MindSpore's own headers include.
_FOR_MINDSPORE = (
    *(f"acl/{name}.h" for name in ("acl", "acl_base", "acl_op", "acl_op_compiler", "acl_rt", "acl_rt_allocator")),
    *("ge/ge_api.h", "graph/operator_reg.h", "graph/tensor.h", "graph/types.h", "hccl/hccl.h"),
)


def write_headers_for_mindspore(folder: pathlib.Path) -> None:
    """Writes what MindSpore's headers for Ascend include of CANN's, with the types that they name."""
    for name in _FOR_MINDSPORE:
        header = folder / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(f'#include "{STAND_IN.parent}/cann_for_mindspore.h"\n')


def operators() -> List[str]:
    """Returns the operators that have a kernel."""
    return sorted(path.stem for path in OPS.glob("*/ascendc/op_host/*.cpp"))


def op_type(op: str) -> str:
    """Returns an operator's name in CANN: lora_delta -> LoraDelta."""
    return "".join(word.capitalize() for word in op.split("_"))


def parameters(op: str) -> Tuple[List[str], List[str]]:
    """Returns the C++ types and names that the first aclnn function of an operator takes, in order."""
    text = (OPS / op / "ascendc/op_host" / f"{op}.cpp").read_text()
    inputs, outputs = (re.findall(rf'\b(?:{kind})\("(\w+)"', text) for kind in ("In|InOut", "Out"))
    kinds = ["aclTensor*" if name in outputs else "const aclTensor*" for name in inputs]
    names = [f"{name}Ref" if name in outputs else name for name in inputs]
    own = [name for name in outputs if name not in inputs]
    called = own if len(outputs) > 1 else ["out"][: len(own)]
    return kinds + ["const aclTensor*"] * len(own), names + [f"{n}Out" if len(outputs) > 1 else n for n in called]


def declarations(op: str) -> str:
    """Returns the header aclnn_<op>.h, as CANN generates it."""
    listed = "".join(f"{kind} {name}, " for kind, name in zip(*parameters(op)))
    return (
        '#pragma once\n#include "aclnn/acl_meta.h"\n\nextern "C" {\n'
        f"aclnnStatus aclnn{op_type(op)}GetWorkspaceSize({listed}uint64_t* workspaceSize, aclOpExecutor** executor);\n"
        f"aclnnStatus aclnn{op_type(op)}("
        "void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream stream);\n}\n"
    )


def definitions(op: str) -> str:
    """Returns both functions, which hand over to caller.h."""
    kinds, names = parameters(op)
    listed = "".join(f"{kind} {name}, " for kind, name in zip(kinds, names))
    source = (OPS / op / "ascendc/op_kernel" / f"{op}.cpp").read_text()
    found = dict(re.findall(r"KERNEL_TASK_TYPE\((\d+), KERNEL_TYPE_(\w+)\)", source))
    by_default = re.findall(r"KERNEL_TASK_TYPE_DEFAULT\(KERNEL_TYPE_(\w+)\)", source)
    types = by_default or [found.get(str(key), "AIV_ONLY") for key in range(1 + max(map(int, found)))]
    numbers = ", ".join(str(KERNEL_TYPES.index(name)) for name in types)
    return f"""
extern "C" aclnnStatus aclnn{op_type(op)}GetWorkspaceSize({listed}uint64_t* workspaceSize, aclOpExecutor** executor)
{{
    static const stand_in::Kernel kernel = {{"{op_type(op)}", "{op}", "{ELEMENTS.get(op, "x")}", {{{numbers}}}}};
    return stand_in::Prepare(kernel, {{{", ".join(names)}}}, workspaceSize, executor);
}}
extern "C" aclnnStatus aclnn{op_type(op)}(
    void* workspace, uint64_t workspaceSize, aclOpExecutor* executor, aclrtStream)
{{
    return stand_in::Launch(workspace, workspaceSize, executor);
}}
"""


def library(target: pathlib.Path, sources: Sequence[pathlib.Path], *flags: str) -> None:
    """Compiles C++ of the stand-in into a shared library."""
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{STAND_IN}", f"-I{STAND_IN}/include", *flags]
    target.parent.mkdir(parents=True, exist_ok=True)
    command += [*map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


def make(folder: pathlib.Path) -> Dict[str, pathlib.Path]:
    """Makes a toolkit and an operator package.

    Args:
        folder (Path): An empty folder.

    Returns:
        dict, the folders "cann" and "package".
    """
    cann, package = folder / "cann", folder / "vendors/mindlora"
    cann.mkdir(parents=True)
    (cann / "include").symlink_to(STAND_IN / "include")
    library(cann / "lib64/libascendcl.so", [STAND_IN / "runtime.cpp"])
    (cann / "lib64/libnnopbase.so").symlink_to("libascendcl.so")
    headers = package / "op_api/include"
    headers.mkdir(parents=True)
    for op in operators():
        (headers / f"aclnn_{op}.h").write_text(declarations(op))
    source = folder / "aclnn.cpp"
    source.write_text('#include "caller.h"\n' + "".join(map(definitions, operators())))
    hosts = [OPS / op / "ascendc/op_host" / f"{op}.cpp" for op in operators()]
    flags = [f"-I{OPS}", f"-I{INCLUDE}", "-ldl"]
    library(package / "op_api/lib/libcust_opapi.so", [source, STAND_IN / "caller.cpp", *hosts], *flags)
    return {"cann": cann, "package": package}
