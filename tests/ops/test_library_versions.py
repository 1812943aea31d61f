"""Which versions of the system's libraries the CPU library asks for: a wheel with it must load on old systems."""

import re
import subprocess

import pytest

from tests.support.operator_process import LIBRARY

# The glibc of Ubuntu 18.04, and the libstdc++ that the libraries of MindSpore 2.9 ask for.
NEWEST = {"GLIBC": (2, 27), "GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 11)}


@pytest.mark.parametrize("name", NEWEST)
def test_no_newer_version_is_needed(library, name):
    printed = subprocess.run(
        ["readelf", "--wide", "--version-info", LIBRARY], check=True, capture_output=True, text=True
    ).stdout
    versions = [tuple(map(int, text.split("."))) for text in re.findall(rf"Name: {name}_([\d.]+)", printed)]
    assert versions and max(versions) <= NEWEST[name]
