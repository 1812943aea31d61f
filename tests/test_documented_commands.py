"""Every command of every page and README is taken by the command as it stands there, overrides of a YAML too."""

import os
import re
import shlex

import pytest

from mindlora import cli
from mindlora.core.errors import ConfigError
from mindlora.core.overrides import keys_and_texts, read_value
from mindlora.training.launch import command_line
from tests.test_documents import DOCUMENTS, FENCE, text_of

# Without those in Chinese, which have the same commands (tests/test_chinese_pages.py).
PAGES = [
    path
    for path in DOCUMENTS
    if path.startswith(("README", f"docs{os.sep}", f"examples{os.sep}")) and "zh-CN" not in path
]
# What a block of commands begins with.
SHELL = re.compile(r"^```(bash|sh|shell|console)?\n")
# A word of the shell that ends a command, and what takes the rest of a line.
END = re.compile(r"^(\||\|\||&&|;|&|>|>>|2>|<|\d?>&\d)$")
# What a page leaves to its reader.
LEFT_OPEN = {"...", "VERB", "NAME"}


def commands_of(document):
    """Returns the words of each command ``mindlora`` or ``mindlora-run`` in the blocks of a page."""
    commands = []
    for block in filter(SHELL.match, FENCE.findall(text_of(document))):
        for line in block.replace("\\\n", " ").splitlines()[1:-1]:
            commands += _commands_of_line(line)
    return commands


def _commands_of_line(line):
    # In what a launcher is given, too.
    line = line.replace("$(which mindlora-run)", "mindlora-run")
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # Not a line of a shell: what a command prints.
        return []
    found = []
    for place, word in enumerate(words):
        begins = place == 0 or END.match(words[place - 1]) or words[0] in ("msrun", "GLOG_v=3")
        if word in ("mindlora", "mindlora-run") and begins:
            ends = (number for number in range(place, len(words)) if END.match(words[number]))
            found.append(words[place : next(ends, len(words))])
    return found


def refusal(words):
    """Returns why a command line is not taken, or None."""
    program, *arguments = words
    try:
        if program == "mindlora-run":
            overrides = command_line.parse(arguments)[1]
        else:
            overrides = getattr(cli._parse(arguments), "overrides", None) or []
        pairs = list(keys_and_texts(overrides))
    except (ConfigError, SystemExit) as error:
        return str(error)
    unread = [text for _, text in pairs if text.startswith(("[", "{")) and isinstance(read_value(text), str)]
    return f"{unread[0]} is read as a text" if unread else None


@pytest.mark.parametrize("document", PAGES)
def test_commands_are_taken_as_they_stand(document, capsys):
    wrong = []
    for words in commands_of(document):
        if not LEFT_OPEN & set(words):
            reason = refusal(words)
            wrong += [f"{shlex.join(words)}: {reason} {capsys.readouterr().err[-200:]}"] if reason is not None else []
    assert not wrong, f"{document} has commands that are not taken:\n" + "\n".join(wrong)


def test_the_commands_are_found():
    assert sum(len(commands_of(document)) for document in PAGES) > 90
    preferences = commands_of(os.path.join("docs", "preferences.md"))
    assert any("--runner_wrapper.preference" in words for words in preferences)
    assert refusal(["mindlora", "base", "merge", "--bases", "x"]) is not None
    assert refusal(["mindlora-run", "--config", "x", "--callbacks", "[{type: a]"]) is not None
