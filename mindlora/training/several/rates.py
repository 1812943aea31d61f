"""AdapterRates: the schedules of several adapters' learning rates, as one schedule of MindFormers."""

from typing import Any, Optional, Sequence

from mindformers.core.lr import build_lr
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule


@MindFormerRegister.register(MindFormerModuleType.LR, legacy=True)
class AdapterRates(LearningRateSchedule):
    """One schedule of MindFormers or MindSpore for each of K adapters, which differ in their learning_rate.

    Args:
        schedule (str): The schedules' type, as in lr_schedule.
        learning_rates (sequence of float): The learning_rate of each; its type is that of lr_schedule.learning_rate.
        learning_rate (float): That of lr_schedule, which no adapter need have.
        own_total_steps (sequence of int, optional): total_steps of each, where they differ. Default: None, they do not.
        **keys: The schedules' other keys.

    Inputs:
        - **global_step** (Tensor) - int32 [K, 1]: the step of each adapter.

    Outputs:
        float32 [K].
    """

    def __init__(
        self,
        schedule: str,
        learning_rates: Sequence[float],
        learning_rate: float,
        own_total_steps: Optional[Sequence[int]] = None,
        **keys: Any,
    ):
        super().__init__()
        self.learning_rate = learning_rate
        schedules = []
        for adapter, rate in enumerate(learning_rates):
            if own_total_steps is not None:
                keys["total_steps"] = own_total_steps[adapter]
            schedules.append(build_lr(class_name=schedule, learning_rate=rate, **keys))
        self.schedules = nn.CellList(schedules)

    def construct(self, global_step: Tensor) -> Tensor:
        rates = ()
        for adapter, schedule in enumerate(self.schedules):
            rates += (schedule(global_step[adapter]).reshape(()),)
        return ops.stack(rates)
