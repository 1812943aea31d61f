"""The Ascend C kernels: whether this machine can use them, and how MindSpore calls them.

scripts/build_ascend.sh builds them into an operator package of CANN; docs/ascend/build.md says how. MindSpore looks for
it where CANN does: in the folders of ASCEND_CUSTOM_OPP_PATH, then in the vendors' folder of CANN itself. The CPU
library infers the shapes, so both devices reject the same shapes with the same message, and dynamic shapes work.

PyNative calls them through a C++ module on MindSpore's AclnnOpRunner, or through ops.Custom without it.
build_pynative.py builds the module. It fits only the version of MindSpore for which it was built. Graph mode always
uses ops.Custom; docs/ascend/calls.md compares the two.
"""

import functools
import importlib.util
import json
import os
import shutil
from types import ModuleType
from typing import Callable, Optional, Union

import mindspore as ms
from mindspore import Tensor, ops
from mindspore._c_expression import MSContext
from mindspore.ops import CustomRegOp, DataType

from mindlora.ops import measured

# The NPUs of the kernels, by their names in MindSpore and build_ascend.sh --soc: Atlas A2 and A3.
SOCS = ("ascend910b", "ascend910_93")
# Where build_ascend.sh puts the package unless it is told otherwise.
PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "ascend", "vendors", "mindlora")
# The inputs of each kernel, in the kernel's order; T is float32, float16 or bfloat16, the same for all.
_T = None
SIGNATURES = {
    "LoraDelta": {"y0": _T, "x": _T, "a": _T, "b": _T, "scale": DataType.F32_Default},
    "LoraLinear": {"x": _T, "w": _T, "a": _T, "b": _T, "scale": DataType.F32_Default, "bias": _T},
    "MultiLoraDelta": {
        "y0": _T,
        "x": _T,
        "pool": _T,
        "ranks": DataType.I32_Default,
        "scales": DataType.F32_Default,
        "indices": DataType.I32_Default,
    },
    "MultiLoraSlotWrite": {
        "pool": _T,
        "ranks": DataType.I32_Default,
        "scales": DataType.F32_Default,
        "slot": DataType.I32_Default,
        "packed": _T,
        "scale": DataType.F32_Default,
    },
    "Nf4Dequantize": {
        "like": _T,
        "codes": DataType.U8_Default,
        "absmax": DataType.U8_Default,
        "scales": DataType.F32_Default,
        "offsets": DataType.F32_Default,
    },
}
# CANN's name of the output, unless it is y. MultiLoraSlotWrite has three more: pool, ranks and scales. They
# have the names of inputs, so CANN's call takes them once, and MindSpore does not see them.
_OUTPUT_NAMES = {"MultiLoraSlotWrite": "written", "Nf4Dequantize": "w"}
# The kernels whose output does not have dtype T.
_OUTPUTS = {"MultiLoraSlotWrite": DataType.I32_Default}
PYNATIVE_MODULE = "mindlora_pynative"
_HERE = os.path.dirname(os.path.abspath(__file__))
PYNATIVE_PATH = os.path.join(_HERE, "lib", "ascend", f"mindspore-{ms.__version__}", f"{PYNATIVE_MODULE}.so")
# The first version of MindSpore whose headers pynative.cc follows.
_OLDEST = (2, 9)
# kVersion in pynative.cc.
_MODULE_VERSION = 1


def problem(op_type: str) -> Optional[str]:
    """Returns why the kernel of an operator (a name in SIGNATURES) cannot be called on this machine, or None."""
    soc = MSContext.get_instance().get_ascend_soc_version()
    if soc not in SOCS:
        return f"the NPU is {soc or 'unknown'}, but the kernels are built for {' and '.join(SOCS)}"
    opp = os.environ.get("ASCEND_OPP_PATH")
    if not opp:
        return "ASCEND_OPP_PATH is not set: source CANN's set_env.sh before Python starts"
    if shutil.which("g++") is None:
        return "g++ is not on PATH, but MindSpore needs it to compile its calls to custom operators"
    packages = _packages(opp)
    installed = [package for package in packages if op_type in _operators(package, soc)]
    if not installed and op_type in _operators(PACKAGE, soc):
        return f"the kernels are not registered: `source {PACKAGE}/bin/set_env.bash` before Python starts"
    if not installed:
        return (
            f"{op_type} for {soc} is not in {' or '.join(packages) or 'any operator package'}: build the kernels "
            f"with scripts/build_ascend.sh --soc {soc}, then source the set_env.bash that it names"
        )
    library = os.path.join(installed[0], "op_api", "lib", "libcust_opapi.so")
    if not os.path.exists(library):
        return f"{library} is missing: build the kernels again with scripts/build_ascend.sh"
    return None


def _packages(opp):
    """Returns the folders where CANN and MindSpore look for operator packages, in the order of their search."""
    folders = [folder for folder in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if folder]
    vendors = os.path.join(opp, "vendors")
    try:
        with open(os.path.join(vendors, "config.ini"), encoding="utf-8") as file:
            order = next((line.partition("=")[2] for line in file if line.startswith("load_priority")), "")
    except OSError:
        order = ""
    return folders + [os.path.join(vendors, name.strip()) for name in order.split(",") if name.strip()]


def _operators(package, soc):
    """Returns the names of the operators that a package has for an NPU."""
    path = os.path.join(package, "op_impl", "ai_core", "tbe", "config", soc, f"aic-{soc}-ops-info.json")
    try:
        with open(path, encoding="utf-8") as file:
            return set(json.load(file))
    except (OSError, ValueError):
        return set()


def registration(op_type: str) -> dict:
    """Returns a kernel's registration for MindSpore: its inputs, its output and their dtypes."""
    inputs = SIGNATURES[op_type]
    info = CustomRegOp(op_type)
    for i, name in enumerate(inputs):
        info.input(i, name, "required")
    info.output(0, _OUTPUT_NAMES.get(op_type, "y"), "required")
    for element in (DataType.F32_Default, DataType.F16_Default, DataType.BF16_Default):
        info.dtype_format(*[dtype or element for dtype in inputs.values()], _OUTPUTS.get(op_type, element))
    return info.target("Ascend").get_op_info()


class AscendKernel(ops.Custom):
    """A kernel of the operator package, wrapped as a primitive with one output.

    MindSpore compiles the call with g++ when the primitive is created, and calls CANN's aclnn<op_type>. A graph holds
    the primitive; PyNative calls it as a function, and so uses the C++ module if there is one. That module has
    no gradients: cells whose result needs one have a bprop. The CPU library infers shapes and types. If the kernel
    ``writes`` into an input, MindSpore does not reorder it with reads of that input.
    """

    def __init__(self, op_type: str, library: str, writes: bool = False):
        self._arguments = (op_type, library, writes)
        measured.tell_plans()
        super().__init__(f"{library}:{op_type}", None, None, "aot", reg_info=registration(op_type))
        if writes:
            self.add_prim_attr("side_effect_mem", True)
        self._in_pynative = pynative_function(op_type, library) or super().__call__

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self._in_pynative(*inputs)

    def __deepcopy__(self, memo):
        # ops.Custom cannot be copied, but cells that hold one are copied.
        return type(self)(*self._arguments)


def pynative_function(op_type: str, library: str) -> Optional[Callable]:
    """Returns the module's function for a kernel, or None without a usable module."""
    module = _find(library)
    return None if isinstance(module, str) else getattr(module, op_type)


def describe(library: str) -> str:
    """Returns a sentence on how graph mode and PyNative call the kernels, and why."""
    entry = _find(library)
    if isinstance(entry, str):
        return f"called by ops.Custom, in PyNative too: {entry}"
    return f"called by ops.Custom in graph mode, and in PyNative by AclnnOpRunner, {PYNATIVE_PATH}"


def _find(library) -> Union[ModuleType, str]:
    """Returns the module, or the reason why there is none."""
    too_old = age_problem()
    if too_old:
        return too_old
    if not os.path.exists(PYNATIVE_PATH):
        return f"{PYNATIVE_PATH} is missing (scripts/build_ascend.sh builds it)"
    return _load(PYNATIVE_PATH, os.path.getmtime(PYNATIVE_PATH), library)


def age_problem() -> Optional[str]:
    """Returns a sentence saying that MindSpore is too old for the module, or None."""
    if tuple(map(int, ms.__version__.split(".")[:2])) >= _OLDEST:
        return None
    return f"MindSpore is {ms.__version__}, but AclnnOpRunner is used from {'.'.join(map(str, _OLDEST))} on"


@functools.lru_cache(maxsize=None)
def _load(path, _modified, library) -> Union[ModuleType, str]:
    try:
        spec = importlib.util.spec_from_file_location(PYNATIVE_MODULE, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        version = module.version
        module.use_library(library)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"{path} cannot be loaded: {error}"
    if version != _MODULE_VERSION:
        return f"{path} is from another version of mindlora ({version}, not {_MODULE_VERSION})"
    return module
