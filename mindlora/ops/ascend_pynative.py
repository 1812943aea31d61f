"""How PyNative calls the Ascend C kernels: by a C++ module on MindSpore's AclnnOpRunner, or by ops.Custom without it.

build_pynative.py builds the module. It fits the one version of MindSpore that it was built for. Graph mode has
ops.Custom always; docs/ascend/calls.md compares the two.
"""

import functools
import importlib.util
import os
from types import ModuleType
from typing import Callable, Optional, Union

import mindspore as ms

NAME = "mindlora_pynative"
_HERE = os.path.dirname(os.path.abspath(__file__))
MODULE = os.path.join(_HERE, "lib", "ascend", f"mindspore-{ms.__version__}", f"{NAME}.so")
# pynative.cc is written to the headers of MindSpore from this version on.
_OLDEST = (2, 9)
# kVersion in pynative.cc.
_MODULE_VERSION = 1


def function(op_type: str, library: str) -> Optional[Callable]:
    """Returns the module's function for a kernel, or None where there is no module that can be used."""
    module = _find(library)
    return None if isinstance(module, str) else getattr(module, op_type)


def describe(library: str) -> str:
    """Returns in words how graph mode and PyNative call the kernels, and why."""
    entry = _find(library)
    if isinstance(entry, str):
        return f"called by ops.Custom, in PyNative too: {entry}"
    return f"called by ops.Custom in graph mode, and in PyNative by AclnnOpRunner, {MODULE}"


def _find(library) -> Union[ModuleType, str]:
    """Returns the module, or why there is none."""
    too_old = age_problem()
    if too_old:
        return too_old
    if not os.path.exists(MODULE):
        return f"{MODULE} is missing (scripts/build_ascend.sh builds it)"
    return _load(MODULE, os.path.getmtime(MODULE), library)


def age_problem() -> Optional[str]:
    """Returns that MindSpore is too old for the module, or None."""
    if tuple(map(int, ms.__version__.split(".")[:2])) >= _OLDEST:
        return None
    return f"MindSpore is {ms.__version__}, and AclnnOpRunner is used from {'.'.join(map(str, _OLDEST))} on"


@functools.lru_cache(maxsize=None)
def _load(path, _modified, library) -> Union[ModuleType, str]:
    try:
        spec = importlib.util.spec_from_file_location(NAME, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        version = module.version
        module.use_library(library)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"{path} cannot be loaded: {error}"
    if version != _MODULE_VERSION:
        return f"{path} is from another version of mindlora ({version}, not {_MODULE_VERSION})"
    return module
