"""A corpus of damaged adapters, which try_damaged_adapters.py tries.

Each case is a function that makes an adapter in its own folder and returns its path, with the error that reading it
must raise and words that the message must contain. test_damaged_adapters.py says what else must be true.
"""

from tests.support import damaged_ckpts, damaged_folders, damaged_safetensors  # noqa: F401 (they add their cases)
from tests.support.damaged_cases import CASES

__all__ = ["CASES"]
