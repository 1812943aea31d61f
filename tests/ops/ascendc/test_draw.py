"""What plans take a core to draw of the bandwidth: the figure whose worst case over all real ones is the least."""

import subprocess

import numpy as np
import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="module")
def draws(tmp_path_factory):
    """The figure of the plans, and how far their times are from the best at worst by each figure, both in tenths."""
    program = str(tmp_path_factory.mktemp("draws") / "draws")
    command = ["g++", "-O1", "-std=c++17", f"-I{ROOT}/ops", f"-I{ROOT}/ops/ascendc_model/include"]
    subprocess.run([*command, f"{ROOT}/tests/support/draws.cpp", "-o", program], check=True)
    taken, *worst = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    return int(taken), {int(tenths): float(ratio) for tenths, ratio in (pair.split(":") for pair in worst)}


def test_no_other_figure_has_a_better_worst_case(draws):
    taken, worst = draws
    assert min(worst, key=worst.get) == taken
    assert worst[taken] <= 1.25 and worst[30] > 2.5


def test_cores_take_parts_in_turns(kernels):
    """Two cores with a slice each have one turn. With two groups of tokens there would be two, and A be read again."""
    _, tiling = kernels.plan("lora_delta", "float16", (129, 1024, 1024, 256), 2, 4)
    rows, depth, slices, *expand = np.frombuffer(tiling, np.uint32)[-8:-2]
    assert [rows, depth, slices] == expand == [144, 512, 2]
