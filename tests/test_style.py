"""How the code of mindlora reads: no comprehension within a comprehension, and no long function."""

import ast

import pytest

from tests.support.sources import modules

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MAX_LINES = 80  # Of code in a function's body: without its signature, docstring, comments and blank lines.


def nested_comprehensions(tree):
    """Returns the lines of comprehensions that hold another one."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS) and child is not node]
            if inner:
                lines.append(node.lineno)
    return sorted(lines)


def long_functions(source, tree):
    """Returns (name, lines) of functions with more than MAX_LINES lines of code in their bodies."""
    lines = source.splitlines()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        body = node.body if ast.get_docstring(node) is None else node.body[1:]
        if not body:
            continue
        code = [line.strip() for line in lines[body[0].lineno - 1 : node.end_lineno]]
        count = sum(bool(line) and not line.startswith("#") for line in code)
        if count > MAX_LINES:
            found.append((node.name, count))
    return found


def test_no_comprehension_within_a_comprehension():
    lines = {module.path: nested_comprehensions(module.tree) for module in modules()}
    assert not {path: at for path, at in lines.items() if at}


def test_no_long_function():
    functions = {module.path: long_functions(module.source, module.tree) for module in modules()}
    assert not {path: names for path, names in functions.items() if names}


@pytest.mark.parametrize(
    "source, lines",
    [
        ("a = [x for x in b]\nc = [x for x in d]", []),
        ("a = [x for row in b for x in row]", []),
        ("a = [[x for x in row] for row in b]", [1]),
        ("a = 1\nb = {x: y\n     for x in all(z for z in c)}", [2]),
        ("a = [x for x in b if any(y for y in x)]", [1]),
        ("a = [f(lambda: {y for y in x}) for x in b]", [1]),
    ],
)
def test_what_counts_as_nested(source, lines):
    assert nested_comprehensions(ast.parse(source)) == lines


@pytest.mark.parametrize("lines, is_long", [(MAX_LINES, False), (MAX_LINES + 1, True)])
def test_what_counts_as_long(lines, is_long):
    code = ["    x = 1"] * lines
    source = "\n".join(["def f(", "    x,", "):", '    """One.', "", '    Two."""', "    # Three.", "", *code])
    assert long_functions(source, ast.parse(source)) == ([("f", lines)] if is_long else [])
