"""Shared by all tests: a quiet MindSpore, and each test's output away from the checkout."""
import os
import sys

# Before MindSpore is imported: no spinning worker threads on few cores, and errors alone in its log.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("GLOG_v", "3")

import pytest  # noqa: E402  pylint: disable=wrong-import-position

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


@pytest.fixture(autouse=True)
def _working_folder(tmp_path, monkeypatch):
    # MindFormers writes output/ under the working folder.
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[0, 1], ids=["graph", "pynative"])
def mode(request):
    """Runs a test in graph mode and in PyNative."""
    import mindspore as ms
    before = ms.get_context("mode")
    ms.set_context(mode=request.param)
    yield request.param
    ms.set_context(mode=before)
