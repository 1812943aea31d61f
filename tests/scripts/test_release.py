"""What scripts/release.sh asks of a checkout before it builds anything (`--check`); a release takes half an hour."""

import os
import re
import shutil
import subprocess

import pytest

import mindlora
from tests.conftest import ROOT

CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [1.2.0]\n\n- A change.\n\n## [1.1.0]\n\n- An older one.\n"


@pytest.fixture
def checkout(tmp_path):
    """A repository of one commit, whose version 1.2.0 can be released."""
    for name, text in (("mindlora/__init__.py", '__version__ = "1.2.0"\n'), ("CHANGELOG.md", CHANGELOG)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "scripts").mkdir()
    shutil.copy(os.path.join(ROOT, "scripts", "release.sh"), tmp_path / "scripts")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def git(checkout, *arguments):
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    subprocess.run(["git", *who, *arguments], cwd=checkout, check=True, stdout=subprocess.DEVNULL)


def commit(checkout):
    git(checkout, "add", "--all")
    git(checkout, "commit", "--quiet", "--message", "A commit")


def checked(checkout):
    """Returns the exit code and what the script printed."""
    command = ["bash", "scripts/release.sh", "--check"]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def test_a_clean_checkout_can_be_released(checkout):
    code, printed = checked(checkout)
    assert code == 0 and re.fullmatch(r"mindlora 1\.2\.0 at [0-9a-f]+ can be released\.\n", printed), printed
    assert (checkout / "build" / "release" / "notes.md").read_text().split() == ["-", "A", "change."]


def test_so_can_the_commit_that_its_tag_names(checkout):
    git(checkout, "tag", "--annotate", "--message", "1.2.0", "v1.2.0")
    assert checked(checkout)[0] == 0


def test_uncommitted_changes_are_refused(checkout):
    (checkout / "new.py").write_text("")
    code, printed = checked(checkout)
    assert code == 1 and "not committed: ?? new.py; commit or stash them" in printed


def test_a_version_that_is_tagged_elsewhere_is_refused(checkout):
    git(checkout, "tag", "v1.2.0")
    (checkout / "new.py").write_text("")
    commit(checkout)
    code, printed = checked(checkout)
    assert code == 1 and "version 1.2.0 is released" in printed and "Raise __version__" in printed


def test_the_tag_of_another_version_is_refused(checkout):
    git(checkout, "tag", "v1.3.0")
    code, printed = checked(checkout)
    assert code == 1 and "tagged v1.3.0, and __version__ in mindlora/__init__.py is 1.2.0" in printed


@pytest.mark.parametrize("line, other", (("[1.2.0]", "[1.2.1]"), ("- A change.\n", "")), ids=("none", "empty"))
def test_a_version_without_its_section_is_refused(checkout, line, other):
    (checkout / "CHANGELOG.md").write_text(CHANGELOG.replace(line, other))
    commit(checkout)
    code, printed = checked(checkout)
    assert code == 1 and 'CHANGELOG.md has no section "## [1.2.0]", or nothing in it' in printed


def test_the_change_log_has_this_version_below_what_is_not_released():
    with open(os.path.join(ROOT, "CHANGELOG.md"), encoding="utf-8") as file:
        headings = re.findall(r"^## \[(.+)\]", file.read(), re.M)
    assert headings[:2] == ["Unreleased", mindlora.__version__]
