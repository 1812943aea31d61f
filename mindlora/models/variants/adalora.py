"""AdaLoRA: the update is P Lambda Q, and the cells that need them get more ranks (Zhang et al., 2023)."""

from typing import Any, Dict, Mapping

import numpy as np

from mindlora.core.errors import ConfigError
from mindlora.core.numerics import rank_schedule
from mindlora.core.numerics.pair_shapes import Pair
from mindlora.models.variants.variant import NOT_LINEAR, SHARDED, Part, Settings, Variant


class AdaLoRA(Variant):
    """A is Q, B is P, and each rank has a weight in Lambda; saved as a plain LoRA of the ranks that are left."""

    name = "AdaLoRA"
    field = "use_adalora"
    unsupported_on = {
        **dict.fromkeys(NOT_LINEAR, "it allocates the ranks of linear cells"),
        SHARDED: "the budget compares the importance of all triplets",
    }
    excludes = (*("use_rslora", "freeze_lora_a", "rank_pattern"), *("lora_init", "lora_a_init", "lora_b_init"))
    defaults = rank_schedule.DEFAULTS
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
        rank_schedule.check_settings(config.budget_settings)
        if config.lora_rank not in (type(config).lora_rank, config.init_r):
            raise ConfigError(
                f"use_adalora is True and lora_rank is {config.lora_rank!r}: AdaLoRA begins with init_r and ends with "
                "target_r on average. Leave lora_rank out."
            )
        config.lora_rank = config.budget_settings.init_r


ADALORA = AdaLoRA()
