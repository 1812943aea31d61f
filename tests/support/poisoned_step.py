"""A train step whose loss can be multiplied by NaN or anything else, for the tests of guards; registered when imported.

A YAML names it as runner_wrapper ``PoisonedStep``, and as a callback ``Poison`` with {step: factor}.
"""

import mindspore as ms
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Parameter, Tensor, nn, ops

from mindlora.models.names import TRANSIENT
from mindlora.training.model.network import train_step_of
from mindlora.training.step.train_step import LoraTrainOneStepCell


class PoisonedLoss(nn.Cell):
    """The sum of a network's losses times a factor, and the number of counted tokens."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network
        self.factor = Parameter(Tensor(1, ms.float32), name=f"{TRANSIENT}poison", requires_grad=False)

    def construct(self, *inputs):
        total, count = self.network(*inputs)
        return total * self.factor, count


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class PoisonedStep(LoraTrainOneStepCell):
    def __init__(self, network, optimizer, **keys):
        super().__init__(PoisonedLoss(network), optimizer, **keys)


@MindFormerRegister.register(MindFormerModuleType.CALLBACK, legacy=True)
class Poison(ms.Callback):
    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def on_train_step_begin(self, run_context):
        params = run_context.original_args()
        factor = train_step_of(params.train_network).network.factor
        ops.assign(factor, Tensor(float(self.factors.get(params.cur_step_num, 1.0)), ms.float32))
