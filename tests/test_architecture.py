"""docs/architecture.md shows the package as it is, and the pages beside it name modules that are there."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def test_tree_order_and_costs_are_those_that_the_script_writes():
    script = os.path.join(ROOT, "scripts", "architecture.py")
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page, count", (("architecture", 5), ("walks", 10), ("decisions", 20)))
def test_every_module_that_the_text_names_is_there(page, count):
    with open(os.path.join(ROOT, "docs", f"{page}.md"), encoding="utf-8") as file:
        text = file.read()
    paths = []
    for top in ("mindlora", "ops", "scripts", "tests"):
        for folder, _, names in os.walk(os.path.join(ROOT, top)):
            paths += [os.path.join(folder, name) for name in names]
    named = set(re.findall(r"[\w/]+\.py\b", text))
    assert len(named) >= count
    missing = [name for name in named if not any(path.endswith("/" + name) for path in paths)]
    assert not missing, f"docs/{page}.md names modules that are gone: {missing}"
