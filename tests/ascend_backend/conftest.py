"""Every test here runs on MindSpore's Ascend backend, or is skipped with the reason why it cannot."""

import pytest

from tests.support.ascend_backend import needs_ascend_backend


@pytest.fixture(scope="session", autouse=True)
def _backend():
    needs_ascend_backend()
