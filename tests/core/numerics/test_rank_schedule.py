"""AdaLoRA's budget: the cubic schedule, the steps that mask, and settings that cannot be."""

import numpy as np
import pytest

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.rank_schedule import BudgetSchedule, BudgetSettings, check_settings

SETTINGS = BudgetSettings(init_r=12, target_r=8, tinit=10, tfinal=20, deltaT=5)


def test_all_triplets_then_a_cubic_fall_then_the_target():
    schedule = BudgetSchedule(SETTINGS, cells=3, total=100)
    budgets = [schedule.budget(step) for step in range(1, 101)]
    assert budgets[:10] == [36] * 10 and budgets[79:] == [24] * 21
    expected = [int(24 + 12 * (1 - (step - 10) / 70) ** 3) for step in range(11, 80)]
    assert budgets[10:79] == expected
    assert (np.diff(budgets) <= 0).all()


def test_triplets_are_masked_at_every_fifth_step_and_at_each_from_the_last_allocation_on():
    schedule = BudgetSchedule(SETTINGS, cells=3, total=103)
    steps = [step for step in range(1, 104) if schedule.masked(step)]
    assert steps == [*range(15, 83, 5), *range(83, 104)]
    assert [schedule.masked(step) for step in (15, 82, 83, 103)] == [36 - schedule.budget(15), 0, 12, 12]
    assert [schedule.learns(step) for step in (1, 82, 83, 103)] == [True, True, False, False]


def test_without_a_final_phase_the_last_step_leaves_the_target():
    schedule = BudgetSchedule(BudgetSettings(), cells=2, total=7)
    assert schedule.masked(7) == 8 and not schedule.learns(7) and schedule.learns(6)


def test_equal_ranks_mask_nothing():
    schedule = BudgetSchedule(BudgetSettings(init_r=8), cells=2, total=7)
    assert [schedule.masked(step) for step in range(1, 8)] == [0] * 7


@pytest.mark.parametrize("tinit, tfinal", [(10, 20), (30, 0), (0, 30), (40, 40)])
def test_a_run_too_short_for_the_phases_is_refused(tinit, tfinal):
    settings = SETTINGS._replace(tinit=tinit, tfinal=tfinal)
    with pytest.raises(ConfigError) as error:
        BudgetSchedule(settings, cells=1, total=30)
    assert str(error.value) == (
        f"pet_config has tinit {tinit} and tfinal {tfinal}, which leave none of the run's 30 steps for allocating "
        "ranks. Lower one of them, or train longer."
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"init_r": 0}, "init_r is 0: it must be a whole number of at least 1."),
        ({"target_r": 1.5}, "target_r is 1.5: it must be a whole number of at least 1."),
        ({"tinit": -1}, "tinit is -1: it must be a whole number of at least 0."),
        ({"tfinal": None}, "tfinal is None: it must be a whole number of at least 0."),
        ({"deltaT": 0}, "deltaT is 0: it must be a whole number of at least 1."),
        ({"beta1": 1.0}, "beta1 is 1.0: it must be a number above 0 and below 1."),
        ({"beta2": 0}, "beta2 is 0: it must be a number above 0 and below 1."),
        ({"orth_reg_weight": -0.1}, "orth_reg_weight is -0.1: it must be a number of at least 0."),
        (
            {"target_r": 13},
            "target_r is 13 and init_r is 12: AdaLoRA only takes ranks away. Raise init_r, to about one and a half "
            "times target_r, or lower target_r.",
        ),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(ConfigError) as error:
        check_settings(BudgetSettings()._replace(**wrong))
    assert str(error.value) == message
