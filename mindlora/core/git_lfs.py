"""Pointers of Git LFS, which stand in for large files in a repository that was cloned without it."""

import os
from typing import Type

from mindlora.core.errors import LoraError

_BEGIN = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(path: str, error: Type[LoraError]) -> None:
    """Raises ``error`` if a file is a pointer of Git LFS; has no effect without a file."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        begin = file.read(len(_BEGIN))
    if begin == _BEGIN:
        raise error(f"{path} is a pointer of Git LFS, not the file itself. Run `git lfs pull` in its repository.")
