"""docs/troubleshooting.md has a row for every message that mindlora raises or warns with, and no others."""

import ast
import builtins
import os
import re

from tests.conftest import ROOT

WARNERS = ("warnings.warn", "logger.warning", "logger.error", "parser.error")
# This many words tell messages apart and keep the rows short. Values that a message fills in become ….
WORDS = 8


def test_every_message_has_a_row():
    missing = [f"{place}: {start}" for place, start in messages() if not any(row.startswith(start) for row in rows())]
    assert not missing, "docs/troubleshooting.md has no row that starts with the `code`\n" + "\n".join(missing)


def test_every_row_has_a_message():
    starts = tuple(start for _, start in messages())
    stale = [row for row in rows() if not row.startswith(starts)]
    assert not stale, "no message of mindlora's starts as these rows of docs/troubleshooting.md\n" + "\n".join(stale)


def rows():
    """Returns the messages of the document's second part: the code that a row of a table starts with."""
    with open(os.path.join(ROOT, "docs", "troubleshooting.md"), encoding="utf-8") as file:
        return re.findall("^\\| `([^`]+)`", file.read().partition("\n## Messages\n")[2], re.M)


def messages():
    """Returns ("file:line", first words) of every text that is raised or given as a warning."""
    found = []
    for folder, _, names in os.walk(os.path.join(ROOT, "mindlora")):
        for path in sorted(os.path.join(folder, name) for name in names if name.endswith(".py")):
            with open(path, encoding="utf-8") as file:
                tree = ast.parse(file.read())
            for node in raised_or_warned(tree):
                start = " ".join(text(node).replace(".…", ".").split()[:WORDS])
                found.append((f"{os.path.relpath(path, ROOT)}:{node.lineno}", start))
    return found


def raised_or_warned(tree):
    """Yields the string of each raise of an exception of our own and of each warning."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            call = node.exc if isinstance(node, ast.Raise) else node
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name in WARNERS or isinstance(node, ast.Raise) and name and not hasattr(builtins, name):
                yield from [call.args[0]] if words(call.args[0]) else indirect(tree, function)


def indirect(tree, function):
    """Returns the sentences in ``function`` and in calls to it, one of which is the value of its variable."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == function.name]
    return [found for part in [*function.body, *calls] for found in sentences(part)]


def sentences(node):
    if words(node) >= 4:
        return [node]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []  # a docstring
    return [found for child in ast.iter_child_nodes(node) for found in sentences(child)]


def words(node):
    return len(re.findall("[A-Za-z]{2,}", text(node)))


def text(node):
    """Returns the text of a string expression, with … for the values that it fills in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub("%[a-z]", "…", node.value)
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else getattr(node, "values", [])
    return re.sub("…+", "…", "".join(map(text, parts))) or "…"
