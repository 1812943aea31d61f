"""Every public function of mindlora is annotated: its arguments and what it returns."""

import ast
import os

import pytest

from tests.conftest import ROOT

# MindSpore calls these two and reads their source; there are no types that would tell more about its tensors.
CALLED_BY_MINDSPORE = ("construct", "bprop")


def public_functions(tree, owner=""):
    """Yields (name, function, whether it is a method) of each public function, and __init__ of each public class."""
    for node in tree.body:
        name = getattr(node, "name", "_")
        if (name.startswith("_") and name != "__init__") or name in CALLED_BY_MINDSPORE:
            continue
        if isinstance(node, ast.ClassDef):
            yield from public_functions(node, f"{name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{owner}{name}", node, bool(owner)


def unannotated(source):
    """Returns what lacks an annotation in a module, as text."""
    found = []
    for name, function, is_method in public_functions(ast.parse(source)):
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        if is_method and arguments and arguments[0].arg in ("self", "cls"):
            del arguments[0]
        found += [f"{name}: {argument.arg}" for argument in arguments if argument.annotation is None]
        if function.returns is None and function.name != "__init__":
            found.append(f"{name}: what it returns")
    return found


def test_every_public_function_is_annotated():
    found = {}
    for folder, _, names in os.walk(os.path.join(ROOT, "mindlora")):
        for path in sorted(os.path.join(folder, name) for name in names if name.endswith(".py")):
            with open(path, encoding="utf-8") as file:
                found[os.path.relpath(path, ROOT)] = unannotated(file.read())
    assert not {path: missing for path, missing in found.items() if missing}


@pytest.mark.parametrize(
    "source, missing",
    [
        ("def f(a, *, b): ...", ["f: a", "f: b", "f: what it returns"]),
        ("class C:\n    def __init__(self, a): ...\n    def construct(self, x): ...", ["C.__init__: a"]),
        ("def f(a: int) -> int: ...\ndef _g(a): ...\nclass _C:\n    def f(self, a): ...", []),
    ],
)
def test_what_counts(source, missing):
    assert unannotated(source) == missing
