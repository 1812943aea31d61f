"""The plan, and the figures that tests/plan compares it with, beside what MindSpore's planner says now.

They run on request: all of them take half an hour.
"""

import pytest

from mindlora.run.plan.memory import memory_of
from mindlora.run.plan.run import read_run
from mindlora.run.plan.trial import try_rank
from mindlora.run.plan.units import GIB
from tests.support.ascend_backend import on_request
from tests.support.planner_figures import FIGURES


@on_request
@pytest.mark.parametrize("figures", FIGURES, ids=str)
def test_mindspores_planner_takes_what_was_measured_and_what_the_plan_says(figures):
    trial = try_rank(figures.config)
    assert trial.passed, trial.error
    device = memory_of(read_run(figures.config))
    assert trial.used == pytest.approx(figures.used * GIB, rel=0.01)
    assert trial.used == pytest.approx(device.used, rel=0.05)
    assert trial.actual == pytest.approx(device.total, rel=0.05)
