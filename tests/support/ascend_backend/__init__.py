"""Runs programs on MindSpore's own Ascend backend, on stand-ins for CANN: what tests of it begin with."""

from tests.support.ascend_backend.launches import Launch
from tests.support.ascend_backend.on_request import EVERYTHING, on_request
from tests.support.ascend_backend.runner import (
    SMALL_LLAMA,
    Run,
    needs_ascend_backend,
    run_mindlora,
    run_program,
    run_yaml,
    write_rows,
)

__all__ = [
    "EVERYTHING",
    "SMALL_LLAMA",
    "Launch",
    "Run",
    "needs_ascend_backend",
    "on_request",
    "run_mindlora",
    "run_program",
    "run_yaml",
    "write_rows",
]
