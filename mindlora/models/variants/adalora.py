"""AdaLoRA: the update is P Lambda Q; the cells that need them get more ranks, within a budget (Zhang et al., 2023)."""

from typing import Any, Dict, Mapping, NamedTuple

import numpy as np

from mindlora.core.errors import ConfigError
from mindlora.core.fields import FRACTION, NOT_NEGATIVE, check_number, whole_numbers
from mindlora.core.numerics.pair_shapes import Pair
from mindlora.models.variants.variant import NOT_LINEAR, SHARDED, Part, Settings, Variant


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


class AdaLoRA(Variant):
    """A is Q, B is P, and each rank has a weight in Lambda; saved as a plain LoRA of the ranks that are left."""

    name = "AdaLoRA"
    field = "use_adalora"
    unsupported_on = {
        **dict.fromkeys(NOT_LINEAR, "it allocates the ranks of linear cells"),
        SHARDED: "the budget compares the importance of all triplets",
    }
    excludes = (*("use_rslora", "freeze_lora_a", "rank_pattern"), *("lora_init", "lora_a_init", "lora_b_init"))
    defaults = DEFAULTS
    # Lambda is multiplied into A before it is saved.
    parts = (Part("lambda", "mindpet_delta_lora_lambda", "", size="r"),)
    zero_part = "lambda"
    in_files = False
    allocates_ranks = True
    # Lambda is masked after the optimizer's update, which would restore it from a copy of another dtype.
    pynative_dtype = "float32"

    def kept_ranks(self, parts: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the triplets whose weight in Lambda is not zero."""
        return np.flatnonzero(parts["lambda"])

    def low_rank_pair(self, parts: Mapping[str, np.ndarray]) -> Pair:
        """Returns Lambda A and B."""
        return parts["lambda"][:, None] * parts["A"], parts["B"]

    def preset(self, fields: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns the fields of a preset, whose rank is the mean at the end; the initial rank is 1.5 times that."""
        others = {field: value for field, value in fields.items() if field != "lora_rank"}
        rank = fields["lora_rank"]
        return {**others, "target_r": rank, "init_r": rank + rank // 2}

    def check_settings(self, config: Settings) -> None:
        """Checks the settings of the budget, and sets lora_rank to init_r."""
        check_settings(config.budget_settings)
        if config.lora_rank not in (type(config).lora_rank, config.init_r):
            raise ConfigError(
                f"use_adalora is True and lora_rank is {config.lora_rank!r}: AdaLoRA begins with init_r and ends with "
                "target_r on average. Leave lora_rank out."
            )
        config.lora_rank = config.budget_settings.init_r


ADALORA = AdaLoRA()
