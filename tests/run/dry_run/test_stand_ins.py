"""How the stand-ins for CANN are compiled and kept."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest

from mindlora.core.errors import InstallationError
from mindlora.run.dry_run import stand_ins


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_functions_return_0_unless_a_source_has_them(tmp_path):
    rest, own = tmp_path / "rest.c", tmp_path / "own.cc"
    rest.write_text(stand_ins.return_0(["aclInit", "aclFinalize"]))
    own.write_text('extern "C" int aclInit() { return 7; }')
    stand_ins.compile_library(tmp_path / "lib.so", [rest, own])
    library = ctypes.CDLL(str(tmp_path / "lib.so"))
    assert (library.aclInit(), library.aclFinalize()) == (7, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lib.so", "own.cc", "rest.c"]


def test_a_folder_is_built_once_and_anew_for_other_content(tmp_path):
    built = []

    def build(folder):
        built.append(folder)
        (folder / "file").write_text("whole")

    first = [stand_ins.built_once("name", [b"a"], build) for _ in range(2)]
    other = stand_ins.built_once("name", [b"b"], build)
    assert first[0] == first[1] != other and len(built) == 2
    assert (first[0] / "file").read_text() == "whole"
    assert first[0].parent == tmp_path / "cache/mindlora/dry_run"


def test_two_that_build_at_once_both_get_a_whole_folder():
    def build(folder):
        for number in range(200):
            (folder / str(number)).touch()

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: stand_ins.built_once("name", [b"a"], build), range(4)))
    assert len(set(folders)) == 1 and len(list(folders[0].iterdir())) == 200
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


def test_a_build_that_fails_leaves_nothing():
    with pytest.raises(ZeroDivisionError):
        stand_ins.built_once("name", [b"a"], lambda folder: 1 / 0)
    assert stand_ins.built_once("name", [b"a"], lambda folder: None).is_dir()


def test_no_compiler_or_one_that_refuses_is_an_error_with_advice(monkeypatch, tmp_path):
    source = tmp_path / "wrong.cc"
    source.write_text("int f() { return nothing; }")
    with pytest.raises(InstallationError, match="(?s)Install g.. 9 or newer.*nothing.* was not declared"):
        stand_ins.compile_library(tmp_path / "lib.so", [source])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InstallationError, match="no C.. compiler .* was found"):
        stand_ins.compile_library(tmp_path / "lib.so", [source])
