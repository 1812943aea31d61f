"""How mindlora reads: no comprehension within a comprehension, a docstring for each module, and native English."""

import ast
import glob
import io
import os
import re
import tokenize

import pytest

from tests.conftest import ROOT
from tests.support.sources import modules

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


# What reads as translated, and how it is said: subject first, active, with articles.
TRANSLATED = {
    r"\b[Tt]ells whether\b": "Returns whether, or says whether",
    r"^(Has|Have) (a|an|all|each|its|such|the)\b": "Makes, lets, or the verb itself",
    r"^Of (?!course)[a-z]": "for, in or among, behind the subject",
    r"\b(?<!here )(is|are|was|were) no (?!longer|more|less|fewer|further)[a-z]+\b": "is not a",
    r"\bAs of [A-Za-z_]+[.,;:]": "as in, or as for",
    r"\b(that|which) [\w' ]+ has not[.,:]": "lacks, or does not have",
    r"^(Returns|Yields|Takes) what\b": "Returns the THING, Yields each THING",
    r"\): (Of|Those|What of) [a-z]": "the noun: the dtype of, the cells that",
}


def nested_comprehensions(tree):
    """Returns the lines of comprehensions that hold another one."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS) and child is not node]
            if inner:
                lines.append(node.lineno)
    return sorted(lines)


def test_no_comprehension_within_a_comprehension():
    lines = {module.path: nested_comprehensions(module.tree) for module in modules()}
    assert not {path: at for path, at in lines.items() if at}


def test_every_module_says_what_it_holds():
    assert not [module.path for module in modules() if not ast.get_docstring(module.tree)]


def prose_of(source):
    """Yields (line, text) of each docstring, comment and longer string of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING and len(token.string) > 25:
            yield token.start[0], re.sub(r"^ +", "", token.string.strip("rbf'\""), flags=re.MULTILINE)


def translated(text):
    """Returns what in a text reads as translated, each with what is said instead."""
    found = []
    for pattern, instead in TRANSLATED.items():
        found += [f"{match[0]}: {instead}" for match in re.finditer(pattern, text, re.MULTILINE)]
    return found


def test_code_is_written_in_native_english():
    problems = []
    for module in modules():
        for line, text in prose_of(module.source):
            problems += [f"{module.path}:{line}: {problem}" for problem in translated(text)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", sorted(glob.glob("*.md", root_dir=ROOT) + glob.glob("docs/**/*.md", root_dir=ROOT)))
def test_pages_are_written_in_native_english(page):
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        text = re.sub(r"^```.*?^```", "", file.read(), flags=re.MULTILINE | re.DOTALL)
    assert not translated(text)


@pytest.mark.parametrize("text", ["Tells whether it ends.", "Of a step: its loss.", "None is no cut.", "It is no key."])
def test_what_counts_as_translated(text):
    assert translated(text)


@pytest.mark.parametrize("text", ["There is no file.", "It is no longer there.", "Of course.", "It is not a list."])
def test_what_does_not_count_as_translated(text):
    assert not translated(text)


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
