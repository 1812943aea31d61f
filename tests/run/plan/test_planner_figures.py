"""The plan beside what MindSpore's own memory planner took for the same runs."""

import pytest

from mindlora.run.plan.memory import memory_of
from mindlora.run.plan.run import read_run
from mindlora.run.plan.units import GIB
from tests.support.planner_figures import FIGURES


@pytest.mark.parametrize("figures", FIGURES, ids=str)
def test_the_plan_is_within_5_percent_of_mindspores_planner(figures):
    device = memory_of(read_run(figures.config))
    assert device.used == pytest.approx(figures.used * GIB, rel=0.05)


@pytest.mark.parametrize("figures", [figures for figures in FIGURES if figures.actual], ids=str)
def test_with_fragments_it_is_too(figures):
    device = memory_of(read_run(figures.config))
    assert device.total == pytest.approx(figures.actual * GIB, rel=0.05)
