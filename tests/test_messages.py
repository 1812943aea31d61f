"""Every error and warning says where, what was found, and what to do."""

import ast
import builtins
import functools
import itertools
import re

import pytest

from mindlora import cli
from mindlora.files.adapters.dialects import foreign
from tests.support.sources import modules

WARNERS = ("warnings.warn", "logger.warning", "logger.error", "parser.error")
# What these functions return says which words there are to choose from.
ADVISERS = ("suggestion", "_candidates")
# A message names the thing by a value that it fills in, or by a key, an option, a class or a file.
NAMES = re.compile(r"…|\w_\w|--\w|\w\.\w|[a-z][A-Z]|[A-Z]{2}|(?<!\w)/[a-z]")
# It says what to do in the imperative, at the beginning of a clause, or what the thing must be.
IMPERATIVES = """
    adapt add apply ask begin build call cast change check choose combine compute convert copy correct delete exclude
    export free fuse give install join keep launch leave let load lower make merge move name narrow pass pick pip plan
    point put quantize quote raise read remove rename repeat replace resume run save say scatter see send serve set
    shard shorten split start store switch take tokenize train try turn type unset update use wait write
"""
COMMAND = re.compile(r"mindlora ((?:(?:adapter|base) )?[a-z][a-z-]+)([^.;)]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Flags of servers and of converters, of which messages speak too.
OF_OTHERS = [
    {"--max-lora-rank", "--tensor-parallel-size", "--fully-sharded-loras", "--enforce-eager", "--lora"},
    {"--enable-mixed-moe-lora-format", "--max-lora-cls-labels", "--runner"},
    {"--save-lora-to-hf", "--lora-load"},
]
BEGINS = r"(^|[.:;,(?] )((?i:and|or|so|then) )?|(?<=\w) (and|or|then) |… (?=[A-Z])"
ADVICE = re.compile(rf"({BEGINS})(?i:{'|'.join(IMPERATIVES.split())})\b|\bmust\b")


def test_every_message_names_the_thing_and_says_what_to_do():
    missing = [f"{place}: {text}" for place, text in messages() if is_sentence(text) and problem(text)]
    assert not missing, "these messages lack a name or advice:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    "text, lacks",
    [
        ("lora_rank is …, but it must be a whole number of at least 1.", None),
        ("There is nothing to write.", "the thing's name"),
        ("… does not exist.", "what to do"),
    ],
)
def test_each_part_can_be_missing(text, lacks):
    assert problem(text) == lacks


def test_what_is_called_advice_is():
    """A message that fills in a value of this name has passed the test above."""
    texts = [form.advice for form in foreign.FOREIGN]
    for node in itertools.chain.from_iterable(ast.walk(module.tree) for module in modules()):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).lower().lstrip("_") == "advice":
            texts += [text_of(part) for part in ast.walk(node.value) if words(part) >= 3]
    assert len(texts) > 30
    assert [text for text in texts if not has_advice(text)] == []


def test_every_command_and_flag_of_an_advice_exists():
    """What a message about files says to do can be done as it stands there."""
    options = options_by_verb()
    every = set().union(*options.values(), *OF_OTHERS)
    wrong = []
    for path, text in texts_about_files():
        wrong += [f"{path}: {flag}" for flag in FLAG.findall(text) if flag not in every]
        for verb, rest in COMMAND.findall(text):
            if verb in options:
                wrong += [f"{path}: {verb} {flag}" for flag in FLAG.findall(rest) if flag not in options[verb]]
            elif "--" in rest:
                wrong.append(f"{path}: mindlora {verb}{rest}")
    assert wrong == []


def options_by_verb():
    """Returns verb -> the flags that it takes."""
    verbs = verbs_below(cli._parser())
    for group in ("adapter", "base"):
        verbs.update({f"{group} {verb}": parser for verb, parser in verbs_below(verbs.pop(group)).items()})
    return {verb: set(parser._option_string_actions) for verb, parser in verbs.items()}


def verbs_below(parser):
    """Returns verb -> its parser."""
    (verbs,) = (action for action in parser._actions if isinstance(action.choices, dict))
    return dict(verbs.choices)


def texts_about_files():
    """Yields (path, text) of each string of the modules on files of adapters and bases, docstrings among them."""
    for path, _, tree in modules():
        if path.startswith("files/"):
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr) or isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield path, text_of(node)


def problem(text):
    """Returns which part a message lacks, or None."""
    if not NAMES.search(text):
        return "the thing's name"
    return None if has_advice(text) else "what to do"


def has_advice(text):
    return bool(ADVICE.search(text))


def is_sentence(text):
    """Tells a whole message from a part of one, such as the reason why a row was left out."""
    return bool(re.match(r"[A-Z…-]|\w+[_.]\w", text)) and text.rstrip().endswith((".", ")", "…"))


def messages():
    """Returns ("file:line", text) of everything that is raised or given as a warning."""
    return [(f"{path}:{node.lineno}", text_of(node)) for path, _, tree in modules() for node in raised_or_warned(tree)]


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
    return len(re.findall("[A-Za-z]{2,}", text_of(node)))


def text_of(node):
    """Returns the text of a string expression, with … for the values that it fills in, except for advice."""
    node = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub("%[a-z]", "…", node.value)
    name = getattr(node, "id", getattr(node, "attr", None))
    if name in ("advice", "reasons"):  # reasons: messages with advice of their own
        return " Use it."
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ADVISERS:
        return " Choose …."
    parts = getattr(node, "values", []) if isinstance(node, ast.JoinedStr) else []
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else parts
    return re.sub("([… ])\\1+", r"\1", "".join(map(text_of, parts))) or constants().get(name, "…")


@functools.lru_cache(maxsize=None)
def constants():
    """Returns constant of a module -> its text; where several modules have the name, one without advice counts."""
    texts = {}
    for node in itertools.chain.from_iterable(module.tree.body for module in modules()):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for name in map(ast.unparse, node.targets):
                texts[name] = min(texts.get(name, node.value.value), node.value.value, key=has_advice)
    return {name: text for name, text in texts.items() if has_advice(text)}
