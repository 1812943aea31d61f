"""Replacing files and folders: the old one or the new one is there, whatever happens in between."""

import concurrent.futures
import contextlib
import errno
import os
import stat
import threading

import pytest

from mindlora.core import atomic

OLD, NEW = {"a": "old", "b": "old"}, {"a": "new", "c": "new"}


class Killed(BaseException):
    """Simulates a kill: nothing after the point where it is raised is run."""


def fill(folder, content):
    os.makedirs(folder, exist_ok=True)
    for name, text in content.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)


def read(folder):
    return {name: open(os.path.join(folder, name), encoding="utf-8").read() for name in os.listdir(folder)}


def replace(folder, content):
    with atomic.replace_folder(folder) as written:
        fill(written, content)


@pytest.fixture(params=["exchange", "two renames"])
def swap(request, monkeypatch):
    """Runs a test with Linux's exchange, and again on a file system that refuses it."""
    if request.param == "two renames":
        refuse(monkeypatch, errno.EINVAL)
    return request.param


def refuse(monkeypatch, code):
    def refused(first, second):
        raise OSError(code, os.strerror(code), second)

    monkeypatch.setattr(atomic, "_exchange", refused)


# Files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, "old"])
def test_a_file_is_replaced(tmp_path, old):
    path = tmp_path / "deeper" / "adapter.ckpt"
    if old:
        path.parent.mkdir()
        path.write_text(old)
    with atomic.replace_file(path) as written:
        assert os.path.dirname(written) == str(path.parent) and written.endswith(".ckpt")
        with open(written, "w", encoding="utf-8") as file:
            file.write("new")
        assert (path.read_text() if old else path.exists()) == (old or False)
    assert path.read_text() == "new" and os.listdir(path.parent) == ["adapter.ckpt"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "adapter.ckpt"
    path.write_text("old")
    with pytest.raises(error), atomic.replace_file(path) as written:
        with open(written, "w", encoding="utf-8") as file:
            file.write("ne")
        raise error
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["adapter.ckpt"]


def test_a_file_that_the_body_removed_is_an_error_and_leaves_the_old_one(tmp_path):
    path = tmp_path / "adapter.ckpt"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), atomic.replace_file(path) as written:
        os.unlink(written)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["adapter.ckpt"]


def test_a_file_in_the_working_folder(tmp_path):
    with atomic.replace_file("adapter.ckpt") as written, open(written, "w", encoding="utf-8") as file:
        file.write("new")
    assert (tmp_path / "adapter.ckpt").read_text() == "new"


# Folders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "/"])
def test_a_folder_is_replaced(tmp_path, swap, end):
    path = tmp_path / "deeper" / "adapter"
    for content in (OLD, NEW):
        replace(f"{path}{end}", content)
        assert read(path) == content and os.listdir(path.parent) == ["adapter"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert {stat.S_IMODE((path / name).stat().st_mode) for name in NEW} == {0o644}


def test_writers_that_end_at_the_same_moment(tmp_path):
    writers, rounds = 4, 30
    together = threading.Barrier(writers)

    def write(content):
        for number in range(rounds):
            with atomic.replace_folder(tmp_path / f"adapter{number}") as written:
                fill(written, content)
                together.wait(timeout=10)

    with concurrent.futures.ThreadPoolExecutor(writers) as pool:
        for written in [pool.submit(write, {"a": str(writer)}) for writer in range(writers)]:
            written.result()
    assert sorted(os.listdir(tmp_path)) == sorted(f"adapter{number}" for number in range(rounds))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("old", [None, OLD])
def test_an_exception_leaves_the_old_folder(tmp_path, swap, error, old):
    path = tmp_path / "adapter"
    if old:
        fill(path, old)
    with pytest.raises(error), atomic.replace_folder(path) as written:
        fill(written, {"a": "ne"})
        raise error
    assert os.listdir(tmp_path) == (["adapter"] if old else [])
    assert not old or read(path) == old


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_two_renames_where_the_exchange_is_refused(tmp_path, monkeypatch, code):
    refuse(monkeypatch, code)
    fill(tmp_path / "adapter", OLD)
    replace(tmp_path / "adapter", NEW)
    assert read(tmp_path / "adapter") == NEW and os.listdir(tmp_path) == ["adapter"]


def test_another_error_of_the_exchange_is_raised_and_leaves_the_old_folder(tmp_path, monkeypatch):
    refuse(monkeypatch, errno.EACCES)
    fill(tmp_path / "adapter", OLD)
    with pytest.raises(PermissionError):
        replace(tmp_path / "adapter", NEW)
    assert read(tmp_path / "adapter") == OLD and os.listdir(tmp_path) == ["adapter"]


def test_the_exchange_swaps_in_one_step(tmp_path):
    fill(tmp_path / "first", OLD)
    fill(tmp_path / "second", NEW)
    try:
        atomic._exchange(tmp_path / "first", tmp_path / "second")
    except OSError as error:
        pytest.skip(f"this file system refuses it: {error}")
    assert read(tmp_path / "first") == NEW and read(tmp_path / "second") == OLD
    with pytest.raises(FileNotFoundError):
        atomic._exchange(tmp_path / "first", tmp_path / "third")


# A kill between the two renames ---------------------------------------------------------------------------------


def kill_between_renames(path, monkeypatch):
    """Leaves what a kill after the first rename leaves: nothing at ``path``, the old folder aside, and the new one."""
    refuse(monkeypatch, errno.EINVAL)
    rename, remove = os.rename, atomic.shutil.rmtree

    def killed(first, second):
        if str(second) == str(path) and not os.path.exists(path):
            raise Killed
        rename(first, second)

    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(os, "rename", killed)
        patch.setattr(atomic.shutil, "rmtree", lambda *arguments, **keys: None)
        replace(path, NEW)
    assert atomic.shutil.rmtree is remove and not os.path.exists(path)


def test_a_reader_restores_the_old_folder(tmp_path, monkeypatch):
    path = tmp_path / "adapter"
    fill(path, OLD)
    kill_between_renames(path, monkeypatch)
    atomic.finish_interrupted_swap(path)
    assert read(path) == OLD


def test_a_writer_after_an_interrupted_swap(tmp_path, monkeypatch):
    path = tmp_path / "adapter"
    fill(path, OLD)
    kill_between_renames(path, monkeypatch)
    with pytest.raises(RuntimeError), atomic.replace_folder(path):
        assert read(path) == OLD
        raise RuntimeError
    assert read(path) == OLD
    replace(path, {"a": "newest"})
    assert read(path) == {"a": "newest"}


def test_a_kill_after_the_second_rename_leaves_the_new_folder(tmp_path):
    fill(tmp_path / "adapter", NEW)
    fill(tmp_path / ".adapter.replaced", OLD)
    atomic.finish_interrupted_swap(tmp_path / "adapter")
    assert read(tmp_path / "adapter") == NEW and os.listdir(tmp_path) == ["adapter"]


def test_without_a_swap_there_is_nothing_to_finish(tmp_path):
    fill(tmp_path / "adapter", OLD)
    atomic.finish_interrupted_swap(tmp_path / "adapter")
    atomic.finish_interrupted_swap(tmp_path / "absent")
    assert read(tmp_path / "adapter") == OLD and os.listdir(tmp_path) == ["adapter"]


def test_several_readers_at_once(tmp_path, monkeypatch):
    path = tmp_path / "adapter"
    fill(path, OLD)
    kill_between_renames(path, monkeypatch)
    rename = os.rename

    def outrun(first, second):
        rename(first, second)
        raise FileNotFoundError(first)  # what the second of two readers is told

    monkeypatch.setattr(os, "rename", outrun)
    atomic.finish_interrupted_swap(path)
    assert read(path) == OLD


# Leftovers ------------------------------------------------------------------------------------------------------


def test_half_written_folders_of_killed_writers_do_no_harm(tmp_path, swap):
    path = tmp_path / "adapter"
    for number in range(3):
        fill(tmp_path / f".adapter.left{number}", {"a": "ha"})
    for content in (OLD, NEW):
        replace(path, content)
        assert read(path) == content


def test_remove_folder(tmp_path):
    path = tmp_path / "adapter"
    for _ in range(2):
        fill(path, OLD)
        fill(tmp_path / ".adapter.replaced.old", OLD)  # what a kill left of an earlier removal
        atomic.remove_folder(path)
        assert not os.listdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        atomic.remove_folder(path)


def test_an_interrupted_removal_leaves_nothing_at_the_path(tmp_path, monkeypatch):
    path = tmp_path / "adapter"
    fill(path, OLD)
    remove = atomic.shutil.rmtree

    def killed(folder, **keys):
        if os.path.isdir(folder):
            os.unlink(os.path.join(folder, "a"))
            raise Killed
        remove(folder, **keys)

    monkeypatch.setattr(atomic.shutil, "rmtree", killed)
    with pytest.raises(Killed):
        atomic.remove_folder(path)
    assert not path.exists()
