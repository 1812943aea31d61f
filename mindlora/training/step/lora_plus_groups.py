"""LoRA+: B learns faster than A."""

from typing import List, Set, Union

import numpy as np
from mindspore import Tensor, nn
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.fields import check_number, numbers
from mindlora.models.variants.registry import LORA, PARAMETERS, VARIANTS
from mindlora.network.tree import lora_cells
from mindlora.training.step.rate_factor import ScaledSchedule

LORA_B = PARAMETERS["B"]
_FAST_PARTS = dict.fromkeys(part for variant in (LORA, *VARIANTS) for part in variant.fast_parts)
# Endings of the names of parameters that learn faster.
FASTER = tuple(PARAMETERS[part] for part in _FAST_PARTS)


def lora_plus_groups(
    network: nn.Cell,
    learning_rate: Union[float, list, Tensor, LearningRateSchedule],
    ratio: float = 16,
    weight_decay: float = 0.0,
) -> List[dict]:
    """Returns the trainable parameters of ``network`` in groups for a MindSpore optimizer: lr(B) = ratio lr(A).

    B and DoRA's magnitudes are in the faster group; A and all other trainable parameters are in the other.

    Args:
        network (nn.Cell): A network with LoRA whose base has been frozen (see freeze_base).
        learning_rate (float, list, Tensor or LearningRateSchedule): The learning rate of A: a number for all steps, one
            number per step (a list, or a Tensor of shape [steps]), or a schedule.
        ratio (float): The learning rate of B divided by that of A; at least 1. Default: 16, which the paper recommends.
        weight_decay (float): Weight decay of both groups. Default: 0.0.

    Returns:
        list of dict, the first argument of ``mindspore.nn.AdamWeightDecay`` or any other optimizer with groups.

    Raises:
        ConfigError: ratio is not a number of at least 1, or learning_rate has another type.
        LoraError: The network has no trainable B.

    Source: Hayou et al., LoRA+: Efficient Low Rank Adaptation of Large Models, 2024.
    """
    check_number(ratio, "ratio", numbers(1))
    trained = network.trainable_params()
    fast = fast_parameters(network)
    faster = [p for p in trained if id(p) in fast]
    if not any(p.name.endswith(LORA_B) for p in faster):
        raise LoraError(
            "The network has no B that is trained, so there is nothing for LoRA+ to speed up. Call apply_lora "
            "and freeze_base first."
        )
    chosen = {id(p) for p in faster}
    groups = [([p for p in trained if id(p) not in chosen], learning_rate), (faster, _multiplied(learning_rate, ratio))]
    return [{"params": params, "lr": rate, "weight_decay": weight_decay} for params, rate in groups if params]


def fast_parameters(network: nn.Cell) -> Set[int]:
    """Returns the ids of adapter parameters that LoRA+ speeds up."""
    fast: Set[int] = set()
    for _, cell in lora_cells(network):
        fast |= {id(parameter) for part, parameter in cell.parts().items() if part in cell.variant.fast_parts}
    return fast


def _multiplied(rate, ratio):
    if isinstance(rate, LearningRateSchedule):
        return ScaledSchedule(rate, ratio)
    if isinstance(rate, Tensor):
        return Tensor((rate.asnumpy() * ratio).astype(np.float32))
    if isinstance(rate, (list, tuple)):
        return [step * ratio for step in rate]
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise ConfigError(f"learning_rate is {rate!r}: it must be a number, a list, a Tensor or a schedule.")
    return rate * ratio
