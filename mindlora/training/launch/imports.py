"""Imports MindFormers, which takes seconds, and avoids unnecessary delays."""

import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
import types
from typing import Any, Iterator

from mindlora.core.mindformers_version import require_mindformers

# nltk takes a quarter of MindFormers' import time, for two names that one metric (BLEU) uses.
_PUT_OFF = ("nltk", "nltk.translate", "nltk.translate.bleu_score")


def import_mindformers() -> None:
    """Imports MindFormers, and MindSpore with it, before anything else does.

    Python's garbage collector is paused, since it would scan a million objects again and again that live as long as the
    process. It does not scan them afterwards either, so that MindSpore's own collections, one before each graph that it
    compiles, take no time. nltk is imported when one of its functions is called.

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
    """Makes ``from nltk.translate.bleu_score import ...`` return functions that import nltk when called."""
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
    """A stand-in for a module; all its names are functions."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, loader=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(_call, self.__name__, name)


def _call(module: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*args, **kwargs)
