"""The stamp of an adapter's files, which tells whether they are still the ones that were read."""

import contextlib
import os
from typing import Optional, Tuple

# What adapters.files.read may open; a change of any other file is no change of the adapter.
_ENDINGS = (".json", ".safetensors", ".ckpt", ".bin")
_BESIDE = ("adapter_config.json", "mindformers_adapter_config.json")

# The path, and of each file its name, mtime in ns, size in bytes and inode.
Stamp = Tuple[str, Tuple[Tuple[str, int, int, int], ...]]


def stamp_of(path: str) -> Optional[Stamp]:
    """Returns what changes when files of the adapter at ``path`` are replaced or written to; None if there are none.

    Args:
        path (str): A folder or a file, which is looked at and not opened.
    """
    try:
        return path, tuple(sorted(_folder(path) if os.path.isdir(path) else _file(path)))
    except OSError:
        return None


def _folder(path):
    with os.scandir(path) as entries:
        return [_described(entry.name, entry.stat()) for entry in entries if entry.name.endswith(_ENDINGS)]


def _file(path):
    found = [_described("", os.stat(path))]
    for name in _BESIDE:
        with contextlib.suppress(FileNotFoundError):
            found.append(_described(name, os.stat(os.path.join(os.path.dirname(path), name))))
    return found


def _described(name, status):
    return name, status.st_mtime_ns, status.st_size, status.st_ino
