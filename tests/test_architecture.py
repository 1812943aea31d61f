"""docs/architecture.md shows the package as it is: scripts/architecture.py would write the same tree."""

import os
import subprocess
import sys

from tests.conftest import ROOT


def test_the_tree_is_the_one_that_the_script_writes():
    script = os.path.join(ROOT, "scripts", "architecture.py")
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
