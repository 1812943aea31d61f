"""Shared by the tests of the cells."""

import pytest

from tests.support.networks import LINEAR_CELLS, linear_cell


@pytest.fixture(params=LINEAR_CELLS)
def plain(request, mindformers):
    """A linear cell as large as IN and OUT of the test's module, and its activation in numpy."""
    return linear_cell(request.param, request.module.IN, request.module.OUT, mindformers)
