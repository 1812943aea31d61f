"""Atomic writes: a process killed at any moment leaves the old file or folder or the new one, never half of one."""

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile
from typing import Iterator

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def replace_file(path: str) -> Iterator[str]:
    """Yields a path in the same folder to write to; on leaving, the file written there replaces ``path``.

    After an exception in the body, ``path`` is unchanged and the written file is removed.
    """
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # With the same suffix, since mindspore.save_checkpoint appends its own to a name that lacks it.
    handle, written = tempfile.mkstemp(
        prefix=f".{os.path.basename(path)}.", suffix=os.path.splitext(path)[1], dir=os.path.dirname(path)
    )
    os.close(handle)
    try:
        yield written
        _sync(written)
        os.chmod(written, 0o644)
        os.replace(written, path)
        _sync(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(written)
        raise


@contextlib.contextmanager
def replace_folder(path: str) -> Iterator[str]:
    """Yields an empty folder in the same parent to fill; on leaving, it replaces ``path``.

    After an exception in the body, ``path`` is unchanged and the new folder is removed.
    """
    path = os.path.abspath(path)
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    finish_interrupted_swap(path)
    written = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", dir=parent)
    try:
        yield written
        for folder, _, names in os.walk(written):
            os.chmod(folder, 0o755)
            for name in names:
                os.chmod(os.path.join(folder, name), 0o644)
                _sync(os.path.join(folder, name))
            _sync(folder)
        try:
            os.rename(written, path)
        except OSError as error:
            # Another process may have put its own there a moment ago, so only the renaming itself can tell.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            _swap(written, path)
        _sync(parent)
    finally:
        # This is the half-written folder after an exception, and the replaced one after a swap.
        shutil.rmtree(written, ignore_errors=True)


def remove_folder(path: str) -> None:
    """Removes a folder in one step: a partly removed one is never at its path."""
    aside = _aside(path) + ".old"
    shutil.rmtree(aside, ignore_errors=True)  # Left by a removal that was killed.
    os.rename(path, aside)
    shutil.rmtree(aside)


def finish_interrupted_swap(path: str) -> None:
    """Restores the folder at ``path`` if a kill between the two renames of a swap has left it under another name."""
    aside = _aside(path)
    if os.path.isdir(aside):
        if os.path.lexists(path):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            # Where several processes load at the same time, only the first finds it.
            with contextlib.suppress(FileNotFoundError):
                os.rename(aside, path)


def _swap(written: str, path: str) -> None:
    try:
        _exchange(written, path)
    except OSError as error:
        # Network file systems refuse the exchange. finish_interrupted_swap can complete these two renames.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        os.rename(path, _aside(path))
        os.rename(written, path)
        shutil.rmtree(_aside(path), ignore_errors=True)


def _exchange(first: str, second: str) -> None:
    """Swaps two paths in one step (Linux renameat2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, "renameat2 is missing")
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


def _aside(path: str) -> str:
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, f".{name}.replaced")


def _sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
