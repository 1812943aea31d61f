"""docs/architecture.md shows the package as it is: its tree has every module of mindlora and no others."""

import os
import re

from tests.conftest import ROOT


def test_the_tree_names_each_module_and_no_other():
    with open(os.path.join(ROOT, "docs", "architecture.md"), encoding="utf-8") as file:
        tree = file.read().partition("```\n")[2].partition("\nops/ ")[0]
    named = sorted(set(re.findall(r"\w+\.py\b", tree)))
    found = {
        name
        for _, _, names in os.walk(os.path.join(ROOT, "mindlora"))
        for name in names
        if name.endswith(".py") and name not in ("__main__.py",)
    }
    assert named == sorted(found)
    folders = {name for name in os.listdir(os.path.join(ROOT, "mindlora")) if not name.startswith(("_", "."))}
    rooms = {name for name in folders if os.path.isdir(os.path.join(ROOT, "mindlora", name))}
    assert set(re.findall(r"^  (\w+)/ ", tree, re.M)) == rooms
