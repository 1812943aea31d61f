"""Writing a file or a folder so that a kill at any moment leaves the old one or the new one, never half of one."""

import contextlib
import ctypes
import errno
import os
import shutil
import tempfile

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def replace_file(path):
    """Yields a path beside ``path`` to write to; on leaving, what was written there takes the place of ``path``.

    An exception in the body leaves ``path`` as it was and removes what was written.
    """
    path = os.path.abspath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # The suffix stays: mindspore.save_checkpoint appends its own to a name that lacks it.
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
def replace_folder(path):
    """Yields an empty folder beside ``path`` to fill; on leaving, it takes the place of ``path``.

    An exception in the body leaves ``path`` as it was and removes the new folder.
    """
    path = os.path.abspath(path)
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    finish_interrupted_swap(path)
    written = tempfile.mkdtemp(prefix=f".{os.path.basename(path)}.", dir=parent)
    try:
        yield written
        os.chmod(written, 0o755)
        for name in os.listdir(written):
            os.chmod(os.path.join(written, name), 0o644)
            _sync(os.path.join(written, name))
        _sync(written)
        if os.path.lexists(path):
            _swap(written, path)
        else:
            os.rename(written, path)
        _sync(parent)
    finally:
        # Holds the half-written folder after an exception, the replaced one after a swap.
        shutil.rmtree(written, ignore_errors=True)


def remove_folder(path):
    """Removes a folder so that no half of it is ever seen under its name."""
    aside = _aside(path) + ".old"
    shutil.rmtree(aside, ignore_errors=True)  # What a kill left of an earlier removal.
    os.rename(path, aside)
    shutil.rmtree(aside)


def finish_interrupted_swap(path):
    """Brings back the folder that a kill left aside in a swap by two renames, where no folder stands at ``path``."""
    aside = _aside(path)
    if os.path.isdir(aside):
        if os.path.lexists(path):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            # Several processes may load at once, and one of them is the first.
            with contextlib.suppress(FileNotFoundError):
                os.rename(aside, path)


def _swap(written, path):
    try:
        _exchange(written, path)
    except OSError as error:
        # Network file systems refuse the exchange: two renames, which finish_interrupted_swap can complete.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
        os.rename(path, _aside(path))
        os.rename(written, path)
        shutil.rmtree(_aside(path), ignore_errors=True)


def _exchange(first, second):
    """Swaps two paths in one step (Linux renameat2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, "renameat2 is missing")
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(second))


def _aside(path):
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(parent, f".{name}.replaced")


def _sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
