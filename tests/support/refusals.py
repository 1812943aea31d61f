"""Asserts that a call is refused: the right class of error, the right words, and network or folder as they were."""

import os
import re

import pytest

from tests.support.networks import snapshot


def part(words):
    """Returns a pattern for ``refused`` that matches any message with ``words`` in it."""
    return re.compile(".*" + re.escape(words), re.DOTALL)


def refused(kind, message, call, *arguments, **keys):
    """Asserts that a call raises an error of exactly this class and message.

    Args:
        kind (type): The class itself; a subclass of it is not enough.
        message (str or Pattern): The whole message, or a pattern that matches from its beginning.
        call (callable): What to call with the remaining arguments.
    """
    with pytest.raises(kind) as caught:
        call(*arguments, **keys)
    assert type(caught.value) is kind
    if isinstance(message, re.Pattern):
        assert message.match(str(caught.value)), str(caught.value)
    else:
        assert str(caught.value) == message


def refused_unchanged(network, kind, message, call, *arguments, **keys):
    """Does what ``refused`` does, and asserts that no cell of the network and no byte of a parameter has changed."""
    before, cells = snapshot(network), _cells(network)
    refused(kind, message, call, *arguments, **keys)
    assert snapshot(network) == before
    assert _cells(network) == cells


def refused_unwritten(folder, kind, message, call, *arguments, **keys):
    """Does what ``refused`` does, and asserts that ``folder`` holds the same files and folders as before."""
    before = sorted(os.listdir(folder))
    refused(kind, message, call, *arguments, **keys)
    assert sorted(os.listdir(folder)) == before


def _cells(network):
    return [(path, type(cell), getattr(cell, "merged", None)) for path, cell in network.cells_and_names()]
