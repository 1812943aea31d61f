"""AdaLoRA's budget: how many triplets of a network may be left after each step."""

from typing import NamedTuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import FRACTION, NOT_NEGATIVE, check_number, whole_numbers


class BudgetSettings(NamedTuple):
    """AdaLoRA's settings, with PEFT's names and defaults.

    Attributes:
        init_r (int): Rank of each cell at first; at least 1.
        target_r (int): Mean rank that is left at the end; from 1 to init_r.
        tinit (int): Steps before the first allocation; at least 0.
        tfinal (int): Steps after the last allocation; at least 0.
        deltaT (int): Steps between two allocations; at least 1.
        beta1 (float): Decay of the mean sensitivity; above 0 and below 1.
        beta2 (float): Decay of its uncertainty; above 0 and below 1.
        orth_reg_weight (float): Weight of the distance of P and Q from orthogonal matrices in the loss; at least 0.
    """

    init_r: int = 12
    target_r: int = 8
    tinit: int = 0
    tfinal: int = 0
    deltaT: int = 1
    beta1: float = 0.85
    beta2: float = 0.85
    orth_reg_weight: float = 0.5


# Field of LoraConfig that only AdaLoRA has -> its default.
DEFAULTS = BudgetSettings()._asdict()


def check_settings(settings: BudgetSettings) -> None:
    """Raises ConfigError if one of AdaLoRA's settings is out of range for runs of any length."""
    for field, least in (("init_r", 1), ("target_r", 1), ("deltaT", 1), ("tinit", 0), ("tfinal", 0)):
        check_number(getattr(settings, field), field, whole_numbers(least))
    for field in ("beta1", "beta2"):
        check_number(getattr(settings, field), field, FRACTION)
    check_number(settings.orth_reg_weight, "orth_reg_weight", NOT_NEGATIVE)
    if settings.target_r > settings.init_r:
        raise ConfigError(
            f"target_r is {settings.target_r} and init_r is {settings.init_r}: AdaLoRA only takes ranks away. Raise "
            "init_r, to about one and a half times target_r, or lower target_r."
        )


class BudgetSchedule:
    r"""The budget of triplets after each step: all of them at first, then a cubic decrease, then the target.

    With T = total - tfinal, n cells and c(t) = (1 - (t - tinit) / (T - tinit))^3, the budget after step t is

    .. math::
        b(t) = n \, init\_r \; (t \le tinit), \quad
        b(t) = n \lfloor target\_r + (init\_r - target\_r) c(t) \rfloor_n \; (tinit < t < T), \quad
        b(t) = n \, target\_r \; (t \ge T)

    where the floor applies to the number of triplets. Triplets are masked at the steps between tinit and T that deltaT
    divides, at T, and at every step after it. Steps count from 1.

    Raises ConfigError if tinit and tfinal leave no step for allocation.

    Source: Zhang et al., AdaLoRA: Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning, 2023, equation 12.
    """

    def __init__(self, settings: BudgetSettings, cells: int, total: int):
        if settings.tinit + settings.tfinal >= total:
            raise ConfigError(
                f"pet_config has tinit {settings.tinit} and tfinal {settings.tfinal}, which leave none of the run's "
                f"{total} steps for allocating ranks. Lower one of them, or train longer."
            )
        self.settings = settings
        self.first = settings.init_r * cells
        self.target = settings.target_r * cells
        self.last_allocation = total - settings.tfinal

    def budget(self, step: int) -> int:
        """Returns how many triplets may be left after ``step``."""
        tinit = self.settings.tinit
        if step <= tinit:
            return self.first
        if step >= self.last_allocation:
            return self.target
        left = 1 - (step - tinit) / (self.last_allocation - tinit)
        return int((self.first - self.target) * left**3 + self.target)

    def masked(self, step: int) -> int:
        """Returns how many triplets are masked after ``step``: 0 at a step that masks none."""
        if step < self.last_allocation and step % self.settings.deltaT:
            return 0
        return self.first - self.budget(step)

    def learns(self, step: int) -> bool:
        """Returns whether ``step`` counts in the importance of triplets; steps from the last allocation on do not."""
        return step < self.last_allocation
