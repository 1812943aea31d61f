"""Every tested MindFormers has what mindlora imports of it, or mindlora asks for a newer one before it imports that."""

import ast
import importlib
import os

import pytest

from mindlora.core.mindformers_version import OLDEST, mindformers_version, release
from tests.conftest import ROOT

GUARD = "require_mindformers"


def imports_of_mindformers(source, package_guards=()):
    """Yields (module, name, oldest MindFormers for which it is asked) of each import in a module's source.

    The oldest one is that of the guards above the import in its own function, at the top of the module, or in the
    __init__.py of its package.
    """
    yield from _imports_in(ast.parse(source), max([OLDEST, *package_guards], key=release))


def guards(source):
    """Returns the version of each guard at the top of a module."""
    return [node.args[0].value for node in _own_nodes(ast.parse(source)) if _is_guard(node)]


def _is_guard(node):
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) == GUARD and bool(node.args)


def _imports_in(scope, oldest):
    for node in _own_nodes(scope):
        if _is_guard(node):
            oldest = max(oldest, node.args[0].value, key=release)
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_of_mindformers(node.module):
            yield from ((node.module, alias.name, oldest) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None, oldest) for alias in node.names if _is_of_mindformers(alias.name))
        elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield from _imports_in(node, oldest)


def _own_nodes(scope):
    """Yields the nodes of a scope in the order of their lines, functions in it without what they hold."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield from _own_nodes(node)


def _is_of_mindformers(module):
    return module.split(".")[0] == "mindformers"


def is_missing(module, name):
    """Returns whether the MindFormers that is installed lacks a module, or a name in it.

    A module that is there, and only lacks another package such as hyper_parallel, counts as having the name.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return _is_of_mindformers(error.name)
    if name is None or hasattr(found, name):
        return False
    return is_missing(f"{module}.{name}", None)


def imports_in(folder):
    """Yields (file, module, name, oldest) of each import of MindFormers below a folder."""
    for parent, _, names in os.walk(folder):
        sources = {name: read(parent, name) for name in sorted(names) if name.endswith(".py")}
        package_guards = guards(sources.get("__init__.py", ""))
        for name, source in sources.items():
            path = os.path.relpath(os.path.join(parent, name), folder)
            yield from ((path, *imported) for imported in imports_of_mindformers(source, package_guards))


def read(*path):
    with open(os.path.join(*path), encoding="utf-8") as file:
        return file.read()


def test_this_mindformers_has_what_is_imported_of_it():
    version = mindformers_version()
    found = list(imports_in(os.path.join(ROOT, "mindlora")))
    assert len(found) > 40  # The check did look at the right folder.
    wanted = [(path, module, name) for path, module, name, oldest in found if release(oldest) <= release(version)]
    missing = [(path, module, name) for path, module, name in wanted if is_missing(module, name)]
    assert not missing, f"MindFormers {version} lacks these: call {GUARD} with the version that has them first"


@pytest.mark.parametrize(
    "source, imported",
    [
        ("from mindformers.a import b, c", [("mindformers.a", "b", OLDEST), ("mindformers.a", "c", OLDEST)]),
        ("import mindformers.a as a, os", [("mindformers.a", None, OLDEST)]),
        ("def f():\n    if x:\n        import mindformers", [("mindformers", None, OLDEST)]),
        ("require_mindformers('2.0')\nimport mindformers", [("mindformers", None, "2.0")]),
        ("require_mindformers('2.0')\ndef f():\n    import mindformers", [("mindformers", None, "2.0")]),
        ("def f():\n    require_mindformers('2.0')\nimport mindformers", [("mindformers", None, OLDEST)]),
        ("def f():\n    import mindformers\n    require_mindformers('2.0')", [("mindformers", None, OLDEST)]),
        ("require_mindformers()\nimport mindformers", [("mindformers", None, OLDEST)]),
        ("from mindformersx import a\nfrom . import mindformers", []),
    ],
)
def test_what_counts_as_an_import(source, imported):
    assert list(imports_of_mindformers(source)) == imported


def test_the_guard_of_a_package_counts_for_its_modules(tmp_path):
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "__init__.py").write_text("require_mindformers('2.0')\n")
    (tmp_path / "newer" / "a.py").write_text("import mindformers.b\n")
    (tmp_path / "c.py").write_text("import mindformers.d\n")
    found = [(name, oldest) for _, name, _, oldest in imports_in(tmp_path)]
    assert sorted(found) == [("mindformers.b", "2.0"), ("mindformers.d", OLDEST)]


def test_what_is_missing():
    assert not is_missing("mindformers.pet", None) and not is_missing("mindformers.pet", "pet_model")
    assert is_missing("mindformers.pet", "nothing") and is_missing("mindformers.nothing", "pet_model")
