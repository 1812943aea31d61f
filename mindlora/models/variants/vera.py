"""VeRA: two vectors train around random matrices that the network's cells share (Kopiczko et al., 2024)."""

import math
from typing import Any, Dict, Mapping

import numpy as np

from mindlora.core.fields import Range, check_number
from mindlora.core.numerics.pair_shapes import Pair
from mindlora.models.variants.variant import NOT_LINEAR, SHARDED, Part, Settings, Variant

_D_INITIAL = Range(
    "a number other than 0: from 0, no gradient reaches VeRA's vectors", lambda value: 0 < abs(value) < math.inf
)
_PRNG_KEY = Range("a whole number from 0 to 2^64 - 1", lambda value: 0 <= value < 2**64, (int,))


class VeRA(Variant):
    """Two vectors for each cell; A and B are the first columns and rows of the shared projection."""

    name = "VeRA"
    field = "use_vera"
    unsupported_on = {
        **dict.fromkeys(NOT_LINEAR, "its shared matrices have the columns and rows of linear cells"),
        SHARDED: "all cells share A and B, which are cut for none of them",
    }
    excludes = (
        *("use_rslora", "freeze_lora_a", "rank_pattern", "alpha_pattern"),
        *("lora_init", "lora_a_init", "lora_b_init"),
    )
    defaults = {"d_initial": 0.1, "projection_prng_key": 0}
    # Its matrices do not train.
    bounded_rank = False
    parts = (
        Part("lambda_d", "mindpet_delta_lora_lambda_d", ".vera_lambda_d", size="r"),
        Part("lambda_b", "mindpet_delta_lora_lambda_b", ".vera_lambda_b", size="out"),
    )
    no_scale = "VeRA's trained vectors are its scale"
    own_pair = False
    factors = ()
    shared_parts = {
        "A": Part("shared A", "mindpet_delta_lora_vera_a", "base_model.vera_A"),
        "B": Part("shared B", "mindpet_delta_lora_vera_b", "base_model.vera_B"),
    }
    tensors = "VeRA vectors"
    report = (
        "yes: all cells share A and B; below, each cell's vectors are multiplied in, and A is as wide as the widest "
        "cell"
    )
    zero_part = "lambda_b"
    cannot_join = "VeRA's vectors belong to rows of matrices that all cells share"
    cannot_combine = "its cells share A and B, which are as wide as the widest cell"

    def check_settings(self, config: Settings) -> None:
        """Checks d_initial and the seed."""
        check_number(config.d_initial, "d_initial", _D_INITIAL)
        check_number(config.projection_prng_key, "projection_prng_key", _PRNG_KEY)

    def reads_input(self, part: str) -> bool:
        """Returns True for the vector between the products, which stands where A's gradient would."""
        return part == "lambda_d"

    def low_rank_pair(self, parts: Mapping[str, np.ndarray]) -> Pair:
        """Returns diag(lambda_d) A and diag(lambda_b) B."""
        return parts["lambda_d"][:, None] * parts["A"], parts["lambda_b"][:, None] * parts["B"]

    def fields_for(self, adapter: Any) -> Dict[str, Any]:
        return {**super().fields_for(adapter), "projection_prng_key": adapter.projection_key}


VERA = VeRA()
