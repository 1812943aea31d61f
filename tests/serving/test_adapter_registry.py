"""AdapterRegistry: names on disk, looked up and never made into paths."""

import os
import time

import pytest

from mindlora.core.errors import AdapterNotFoundError, ConfigError, RequestError
from mindlora.serving.adapter_registry import AdapterRegistry
from tests.support.refusals import part, refused
from tests.support.served_adapters import put


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def folder(tmp_path):
    """A folder of the adapters math and code, with things in it that are none."""
    path = tmp_path / "adapters"
    put(path, "math", 1)
    put(path, "code", 2)
    put(path, ".code.replaced", 3)
    (path / "README.md").write_text("no adapter")
    return path


def test_subfolders_are_names(folder):
    registry = AdapterRegistry(str(folder))
    assert registry.names() == ["code", "math"] and len(registry) == 2
    assert registry.path("math") == str(folder / "math")
    assert "math" in registry and ".code.replaced" not in registry and "README.md" not in registry


def test_names_given_one_by_one_go_before_subfolders(folder, tmp_path):
    other = put(tmp_path / "elsewhere", "math", 5)
    registry = AdapterRegistry(str(folder), {"math": other, "a/b": other})
    assert registry.names() == ["a/b", "code", "math"] and registry.path("math") == other
    assert AdapterRegistry(None, {"one": other}).names() == ["one"]
    assert AdapterRegistry().names() == []


@pytest.mark.parametrize(
    "name", ["../adapters/math", "math/", "./math", "/etc", "math\0", "", "..", ".code.replaced", "README.md", "MATH"]
)
def test_a_name_is_never_a_path(folder, name):
    with pytest.raises(AdapterNotFoundError):
        AdapterRegistry(str(folder)).path(name)


def test_an_unknown_name_gets_near_ones(folder):
    registry = AdapterRegistry(str(folder))
    words = "There is no adapter 'maths'. Did you mean 'math'? Choose from the 2 that /v1/models lists."
    refused(AdapterNotFoundError, words, registry.path, "maths")
    words = "There is no adapter 'zzz'. Choose from the 2 that /v1/models lists."
    refused(AdapterNotFoundError, words, registry.path, "zzz")
    refused(
        AdapterNotFoundError,
        "There is no adapter 'math'. None is registered: ask the base.",
        AdapterRegistry().path,
        "math",
    )
    refused(AdapterNotFoundError, part(f"There is no adapter '{'x' * 190}"), registry.path, "x" * 100_000)


@pytest.mark.parametrize("wrong", ["customer-0412x", "custmer-0412", "kustomer-0412", "customer-0412 "])
def test_near_names_are_found_among_many_without_looking_at_all(wrong):
    registry = AdapterRegistry(None, {f"customer-{number:04}": os.sep for number in range(10_000)})
    with pytest.raises(AdapterNotFoundError, match="'customer-0412'"):
        registry.path(wrong)

    def ask():
        with pytest.raises(AdapterNotFoundError):
            registry.path(wrong)

    assert fastest(ask) < 0.01


def test_ten_thousand_adapters_are_registered_in_a_moment(tmp_path):
    for number in range(10_000):
        os.mkdir(tmp_path / f"tenant-{number}")
    registry = AdapterRegistry(str(tmp_path))
    assert len(registry) == 10_000
    assert fastest(lambda: AdapterRegistry(str(tmp_path))) < 0.3
    assert fastest(lambda: [(registry.path("tenant-9876"), registry.refresh()) for _ in range(100)]) < 0.002


def fastest(call):
    """Returns the seconds of the fastest of some calls: what else the machine does only adds to them."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


# Changes on the disk -------------------------------------------------------------------------------------------


def test_the_folder_is_looked_at_once_a_second_and_listed_when_it_has_changed(folder, monkeypatch):
    clock, listed = Clock(), []
    os.utime(folder, (1, 1))
    registry = AdapterRegistry(str(folder), clock=clock)
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scan(path))
    clock.now = 5
    assert registry.names() == ["code", "math"] and not listed
    put(folder, "law", 4)
    assert registry.names() == ["code", "math"] and not listed
    clock.now = 6
    assert registry.names() == ["code", "law", "math"] and len(listed) == 1
    os.rename(folder / "law", folder.parent / "law")
    clock.now = 7.5
    assert registry.names() == ["code", "math"]
    with pytest.raises(AdapterNotFoundError):
        registry.path("law")


def test_two_changes_within_one_tick_of_the_file_system_are_both_seen(folder):
    clock, now = Clock(), time.time_ns()
    os.utime(folder, ns=(now, now))
    registry = AdapterRegistry(str(folder), clock=clock)
    put(folder, "law", 4)
    os.utime(folder, ns=(now, now))
    clock.now = 2
    assert registry.names() == ["code", "law", "math"]


def test_a_folder_out_of_reach_leaves_what_was_known(folder):
    clock = Clock()
    registry = AdapterRegistry(str(folder), clock=clock)
    os.rename(folder, folder.parent / "away")
    clock.now = 2
    assert registry.names() == ["code", "math"]
    os.rename(folder.parent / "away", folder)
    put(folder, "law", 4)
    clock.now = 4
    assert registry.names() == ["code", "law", "math"]


# While the server runs -----------------------------------------------------------------------------------------


def test_adapters_come_and_go_at_run_time(folder):
    clock = Clock()
    registry = AdapterRegistry(str(folder), clock=clock)
    os.makedirs(folder / "deep" / "inside")
    registry.register("new", str(folder / "deep" / "inside"))
    registry.register("near", "deep")
    assert registry.path("new") == str(folder / "deep" / "inside") and registry.path("near") == str(folder / "deep")
    registry.unregister("new")
    registry.unregister("math")
    clock.now = 5
    assert registry.names() == ["code", "deep", "near"]
    for name in ("new", "math"):
        with pytest.raises(AdapterNotFoundError):
            registry.unregister(name)
    registry.register("math", "math")
    assert registry.path("math") == str(folder / "math")


def test_a_name_is_taken_once(folder):
    registry = AdapterRegistry(str(folder))
    words = "There is an adapter 'math' already: unload it first, or use another name."
    refused(RequestError, words, registry.register, "math", "code")
    assert registry.path("math") == str(folder / "math")


@pytest.mark.parametrize(
    "path", ["..", "../elsewhere/x", "/etc", "link", "link/x", "gone", ".", "", "math\0", "m" * 9999]
)
def test_paths_outside_of_the_folder_are_refused(folder, tmp_path, path):
    put(tmp_path / "elsewhere", "x", 1)
    os.symlink(tmp_path / "elsewhere", folder / "link")
    registry = AdapterRegistry(str(folder))
    registry.unregister("link")
    with pytest.raises(RequestError, match="There is no adapter at .* in the server's folder of adapters"):
        registry.register("new", path)
    assert "new" not in registry
    registry.register("new", str(tmp_path / "elsewhere" / "x"), restricted=False)
    assert registry.path("new") == str(tmp_path / "elsewhere" / "x")


def test_links_within_the_folder_are_taken(folder):
    os.symlink(folder / "math", folder / "same")
    registry = AdapterRegistry(str(folder))
    assert registry.names() == ["code", "math", "same"]
    registry.register("new", "same")
    assert registry.path("new") == str(folder / "math")


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 256, "\udc80"])
def test_names_that_cannot_be_shown_are_refused(folder, name):
    with pytest.raises(ConfigError, match="cannot be the name of an adapter"):
        AdapterRegistry(None, {name: str(folder / "math")})
    with pytest.raises(RequestError, match="cannot be the name of an adapter"):
        AdapterRegistry(str(folder)).register(name, "math")


def test_what_is_no_folder_of_adapters_is_refused(folder, tmp_path):
    refused(ConfigError, part("is not a folder: name one whose subfolders"), AdapterRegistry, str(folder / "README.md"))
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(ConfigError, part("is an adapter, not a folder of adapters"), AdapterRegistry, str(tmp_path))
    words = f"The adapter 'a' is said to be at {tmp_path / 'gone'}, where there is nothing. Check the path."
    refused(ConfigError, words, AdapterRegistry, None, {"a": str(tmp_path / "gone")})
    words = (
        "Adapters can be loaded at run time from the folder of --adapters, but there is none. Start the "
        "server with --adapters DIR."
    )
    refused(RequestError, words, AdapterRegistry().register, "a", str(folder))
