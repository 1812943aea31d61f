"""Imports MindFormers, which takes seconds, without what makes it longer than it must be."""

import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
import types
from typing import Any, Iterator

from mindlora.core.mindformers_version import require_mindformers

# A quarter of the time of MindFormers' import, for the two names that one metric (BLEU) takes of it.
_PUT_OFF = ("nltk", "nltk.translate", "nltk.translate.bleu_score")


def import_mindformers() -> None:
    """Imports MindFormers, and MindSpore with it, before anything else does.

    Python's garbage collector is paused: it would look again and again at a million objects that live as long as the
    process. It does not look at them afterwards either, so that MindSpore's own collections, one before each graph that
    it compiles, take no time. nltk is imported when something of it is called.

    Raises InstallationError if MindFormers cannot be imported.
    """
    if "mindformers" in sys.modules:
        return
    require_mindformers()
    gc.disable()
    try:
        with _nltk_put_off():
            importlib.import_module("mindformers")
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _nltk_put_off() -> Iterator[None]:
    """Has ``from nltk.translate.bleu_score import ...`` give functions that import nltk when they are called."""
    if "nltk" in sys.modules or importlib.util.find_spec("nltk") is None:
        yield
        return
    sys.modules.update({name: _PutOff(name) for name in _PUT_OFF})
    try:
        yield
    finally:
        for name in _PUT_OFF:
            del sys.modules[name]


class _PutOff(types.ModuleType):
    """Stands for a module whose names are all called."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, loader=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(_call, self.__name__, name)


def _call(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)
