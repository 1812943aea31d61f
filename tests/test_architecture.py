"""docs/architecture.md shows the package as it is: scripts/architecture.py would write the same tree."""

import os
import re
import subprocess
import sys

from tests.conftest import ROOT


def test_the_tree_is_the_one_that_the_script_writes():
    script = os.path.join(ROOT, "scripts", "architecture.py")
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_every_module_that_the_text_names_is_there():
    with open(os.path.join(ROOT, "docs", "architecture.md"), encoding="utf-8") as file:
        text = file.read().partition("<!-- End of the tree. -->")[2]
    paths = []
    for top in ("mindlora", "ops", "scripts", "tests"):
        for folder, _, names in os.walk(os.path.join(ROOT, top)):
            paths += [os.path.join(folder, name) for name in names]
    named = set(re.findall(r"[\w/]+\.py\b", text))
    assert len(named) > 20
    missing = [name for name in named if not any(path.endswith("/" + name) for path in paths)]
    assert not missing, f"docs/architecture.md names modules that are gone: {missing}"
