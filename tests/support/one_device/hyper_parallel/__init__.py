"""A stand-in for hyper_parallel, which shards MindFormers' PyNative models, for tests on whole models.

hyper_parallel is on no package registry, and MindFormers imports it whatever the number of devices. With the folder
above this one on sys.path those imports work, and a model trains in one process, or in several that all have the whole
model (replicas.py). It proves nothing about sharding: what that needs raises NotImplementedError where it is used.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys

from hyper_parallel.replicas import (  # noqa: F401
    DeviceMesh,
    DTensor,
    HSDPModule,
    Replicate,
    Shard,
    distribute_tensor,
    fully_shard,
    get_current_layout,
    init_device_mesh,
    reduce_gradients,
)


def enable_mindspore_backward_compat() -> None:
    """Gives Tensor backward() and grad, which MindSpore 2.10 has under other names, and records what runs."""
    from mindspore import Tensor
    from mindspore._c_expression import run_backward
    from mindspore.common.api import _pynative_executor

    def backward(self, gradient=None, retain_graph=False, create_graph=False):
        run_backward((self,), (gradient,), retain_graph, create_graph, ())
        reduce_gradients()

    Tensor.backward = backward
    Tensor.grad = property(lambda self: self._grad, lambda self, value: setattr(self, "_grad", value))
    _pynative_executor.set_grad_flag(True)


class SkipDTensorDispatch(contextlib.nullcontext):
    """Nothing to skip: operators take every tensor as it is."""


class _Unavailable:
    """What is made of any other name: MindFormers makes some while it is imported, and one process uses none."""

    def __init__(self, *_: object, **__: object):
        pass

    def __getattr__(self, name: str):
        raise NotImplementedError(
            f"hyper_parallel's stand-in divides no model and has no {type(self).__name__}.{name}: "
            "a test of it needs hyper_parallel itself."
        )


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    # A class of its own for each name: no tensor is an instance of DTensor.
    return globals().get(name) or globals().setdefault(name, type(name, (_Unavailable,), {}))


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module below hyper_parallel, with the names of hyper_parallel itself."""

    def find_spec(self, name, path=None, target=None):
        if not name.startswith("hyper_parallel."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(sys.modules[__name__], name)


sys.meta_path.append(_Modules())
