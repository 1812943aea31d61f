"""StepOfAdapter: one adapter of a stack, as callbacks know the train step of a run with one adapter."""

import math
from typing import Dict, Iterator

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.training.several.held_out import HeldOutOfAdapters
from mindlora.training.several.stack import AdapterStack, Slice, pull, push
from mindlora.training.several.train_step import UpdatesOfAdapters
from mindlora.training.step.train_step import StepRecord

# What the names of an optimizer's parameters begin with: both moments, and float32 copies of weights in 16 bits.
_BESIDE_WEIGHTS = ("adam_m", "adam_v", "main_param")


class StepOfAdapter(nn.Cell):
    """What callbacks read and set of a train step, for one adapter of several.

    Its parameters have the names and shapes of a run with this adapter alone, so what is saved of it is what such a run
    saves. They hold the adapter's state between collect_state and distribute_state.

    Args:
        stack (AdapterStack): The adapters of the run.
        step (UpdatesOfAdapters): What takes the steps of all of them.
        number (int): Which of them.
        held_out (HeldOutOfAdapters): What measures their held-out losses.

    Attributes:
        network (Cell): The adapter's own network.
        rate_factors (dict): The factors of the learning rate: source -> value.
    """

    is_mindformers_step = False
    loss_scaling_manager = exchange = None
    learns_preferences = False

    def __init__(self, stack: AdapterStack, step: UpdatesOfAdapters, number: int, held_out: HeldOutOfAdapters):
        super().__init__(auto_prefix=False)
        self.network = stack.networks[number]
        self.number = number
        self.rate_factors: Dict[str, float] = {}
        self.scale_sense = None
        if step.scale_sense is not None:
            self.scale_sense = Parameter(Tensor(step.scale_sense, mstype.float32), "scale_sense", requires_grad=False)
        optimizer = step.optimizer
        self.global_step = Parameter(Tensor([0], mstype.int32), "global_step", requires_grad=False)
        weights = stack.slices(number)
        kept = {p.name: p for p in (*optimizer.exp_avg, *optimizer.exp_avg_sq, *optimizer.weights)}
        beside = []
        for prefix in _BESIDE_WEIGHTS:
            beside += [_beside(kept, prefix, weight) for weight in weights if _name(prefix, weight.stacked) in kept]
        self.moments = tuple(each.own for each in beside)
        self.slices = [*weights, *beside, Slice(optimizer.global_step, number, self.global_step)]
        # Not cells of this one, whose parameters are the adapter's alone.
        self._all = (step, held_out)

    def collect_state(self) -> None:
        """Takes over from the stack what the adapter's parameters are now."""
        pull(self.slices)

    def distribute_state(self) -> None:
        """Gives to the stack what the adapter's parameters have been set to."""
        push(self.slices)

    def get_parameters(self, expand: bool = True) -> Iterator[Parameter]:
        """As for a cell, with what the optimizer keeps beside the weights."""
        yield from super().get_parameters(expand)
        yield from self.moments

    def last_record(self) -> StepRecord:
        """Returns what the last step measured of the adapter."""
        return self._all[0].record_of(self.number)

    def set_limits(self, loss: float, gradient_norm: float) -> None:
        """Sets above which loss, or norm of the gradient before clipping, a step is skipped; infinity for no limit."""
        self._all[0].set_limits(self.number, loss, gradient_norm)

    def set_rate_factor(self, source: str, value: float) -> None:
        """Sets the factor of the learning rate that ``source`` asks for; the product of all sources' factors holds."""
        self.rate_factors[source] = float(value)
        self._all[0].set_rate_factor(self.number, math.prod(self.rate_factors.values()))

    def stop(self) -> None:
        """Lets the adapter be as it is from now on."""
        self._all[0].stop(self.number)

    def held_out_loss(self, dataset_dir: str, batch_size: int) -> float:
        """Returns the adapter's mean loss on a MindRecord, which is measured for all adapters at once."""
        return self._all[1].loss(self.number, dataset_dir, batch_size)


def _beside(kept, prefix, weight):
    """Returns the slice of what the optimizer keeps beside a weight, as that of the weight."""
    zeros = Tensor(np.zeros(weight.own.shape, np.float32))
    own = Parameter(zeros, _name(prefix, weight.own), requires_grad=False)
    return Slice(kept[_name(prefix, weight.stacked)], weight.number, own)


def _name(prefix, parameter):
    return f"{prefix}.{parameter.name}"
