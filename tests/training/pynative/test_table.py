"""The table of docs/pynative.md says of every callback what the code does."""

import os
import re

from tests.conftest import ROOT
from tests.support import pynative_runs


def printed(program, folder):
    """Returns the words that a program prints last, in a process with mindlora's part of the PyNative Trainer."""
    run = pynative_runs.python(
        ["-c", f"from tests.support import pynative_cpu; pynative_cpu.install(); {program}"], folder
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()[-1].split()


def rows_of_the_table():
    with open(os.path.join(ROOT, "docs", "pynative.md"), encoding="utf-8") as file:
        return [line.strip("|\n ").split(" | ") for line in file if line.startswith("| `")]


@pynative_runs.only_with_pynative_trainer
def test_every_callback_is_in_the_table_as_it_is(tmp_path):
    program = "from mindlora.training.callbacks.registry import ORDER; "
    program += "from mindlora.training.pynative.callbacks import CALLBACKS; "
    program += "print(*(f'{name}:{name in CALLBACKS}' for name in ORDER if name != 'LossCurve'))"
    works = dict(word.split(":") for word in printed(program, tmp_path))
    rows = rows_of_the_table()
    said = {name: row[2].split(",")[0] for row in rows for name in re.findall(r"`([A-Z]\w+)`", row[0])}
    assert said == {name: {"True": "works", "False": "refused"}[known] for name, known in works.items()}
