"""The table of docs/pynative.md says of every callback what the code does."""

import os
import re

from mindlora.training.callbacks.registry import ORDER
from mindlora.training.pynative.callbacks import CALLBACKS
from tests.conftest import ROOT
from tests.support import pynative_runs


def test_every_callback_is_in_the_table_as_it_is():
    with open(os.path.join(ROOT, "docs", "pynative.md"), encoding="utf-8") as file:
        rows = [line.strip("|\n ").split(" | ") for line in file if line.startswith("| `")]
    said = {name: row[2].split(",")[0] for row in rows for name in re.findall(r"`([A-Z]\w+)`", row[0])}
    assert said == {name: "works" if name in CALLBACKS else "refused" for name in ORDER if name != "LossCurve"}


@pynative_runs.only_with_pynative_trainer
def test_every_refused_key_of_pet_config_is_in_the_table(tmp_path):
    """The variants stand there with the names of their pages."""
    code = "from tests.support import pynative_cpu; pynative_cpu.install(); "
    code += "from mindlora.training.pynative import configuration; print(*configuration._NOT_YET)"
    run = pynative_runs.python(["-c", code], tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    refused = {name for name in run.stdout.splitlines()[-1].split() if not name.startswith("use_")}
    with open(os.path.join(ROOT, "docs", "pynative.md"), encoding="utf-8") as file:
        rows = [line.strip("|\n ").split(" | ") for line in file if line.startswith("| `")]
    assert refused <= {name for row in rows if row[2] == "refused" for name in re.findall(r"`(\w+)`", row[0])}
