"""The two figures of the plans that only an NPU can tell: how far plans are from the best ones at worst, by each value.

They are what a core draws of the bandwidth, and what a launch of cube cores costs more.
"""

import subprocess

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.support.ascendc_model import kernels
from tests.support.ascendc_model.model import INCLUDE


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """For each figure the value that plans have, and how far plans are from the best ones at worst by each value."""
    program = str(tmp_path_factory.mktemp("figures") / "unknown_figures")
    command = ["g++", "-O2", "-std=c++17", f"-I{ROOT}/ops", f"-I{INCLUDE}"]
    subprocess.run([*command, f"{ROOT}/tests/support/unknown_figures.cpp", "-o", program], check=True)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    return [parsed(line) for line in lines]


def parsed(line):
    taken, *pairs = line.split()
    worst = {}
    for pair in pairs:
        value, ratio = pair.split(":")
        worst[int(value)] = float(ratio)
    return int(taken), worst


def test_no_other_draw_has_a_better_worst_case(figures):
    taken, worst = figures[0]
    assert min(worst, key=worst.get) == taken
    assert worst[taken] <= 1.25 and worst[30] > 2.5


def test_no_other_cost_of_a_launch_has_a_worst_case_that_is_better_by_a_hundredth(figures):
    taken, worst = figures[1]
    assert taken == 0 and worst[0] <= 1.01 * min(worst.values())
    assert worst[0] <= 1.5 and worst[300] > 2 and worst[3000] > 3.5


def test_cores_take_parts_in_turns():
    """Two cores with a slice each have one turn. With two groups of tokens there would be two, and A be read again."""
    _, tiling = kernels.plan("lora_delta", "float16", (129, 1024, 1024, 256), 2, 4)
    rows, depth, slices, *expand = np.frombuffer(tiling, np.uint32)[-8:-2]
    assert [rows, depth, slices] == expand == [144, 512, 2]
