"""The table of docs/pynative.md says of every callback what the code does."""

import os
import re

from mindlora.plugin.callbacks.order import ORDER
from mindlora.plugin.pynative.support import CALLBACKS
from tests.conftest import ROOT


def test_every_callback_is_in_the_table_as_it_is():
    with open(os.path.join(ROOT, "docs", "pynative.md"), encoding="utf-8") as file:
        rows = [line.strip("|\n ").split(" | ") for line in file if line.startswith("| `")]
    said = {name: row[2].split(",")[0] for row in rows for name in re.findall(r"`([A-Z]\w+)`", row[0])}
    assert said == {name: "works" if name in CALLBACKS else "refused" for name in ORDER}
