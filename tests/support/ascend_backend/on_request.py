"""Runs that a suite leaves out unless they are asked for: each takes half a minute of a core, or more."""

import os

import pytest

EVERYTHING = os.environ.get("MINDLORA_ASCEND_RUNS") == "all"
on_request = pytest.mark.skipif(not EVERYTHING, reason="runs with MINDLORA_ASCEND_RUNS=all")
