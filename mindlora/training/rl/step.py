"""The train step of a run that learns from rewards: it answers prompts, rates the answers, and learns from them."""

from typing import Any, Mapping, Tuple

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.training.model.network import base_of
from mindlora.training.rl.gkd_policy import GkdPolicy
from mindlora.training.rl.gradients import GivenGradients
from mindlora.training.rl.policies import Policies
from mindlora.training.rl.policy import Policy
from mindlora.training.rl.settings import rl_settings
from mindlora.training.step.train_step import LoraTrainOneStepCell, StepRecord


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class RlTrainOneStepCell(LoraTrainOneStepCell):
    """LoraTrainOneStepCell for a run with ``rl``, which mindlora-run puts in its place.

    A call samples the answers to the prompts of a step, has them rated, adds up the gradient of the policy's loss over
    batches of rows (Policies), and takes the optimizer's step as LoraTrainOneStepCell does: clipping, limits, learning
    rate and record are its.

    Args:
        rl (dict): The fields of RlSettings.
        sampler (dict): As for Policies, and ``seed``, the run's.
        **kwargs: As for LoraTrainOneStepCell.

    Inputs:
        - **step** (Tensor) - int32 [1, 1]: the number of the step, from 0.

    Attributes:
        policies (Policies): The policy, which is number 0 of one.

    Raises:
        ConfigError: An argument is out of range, or cannot hold in the parallel mode.
    """

    # Which of the policies callbacks are told of.
    number = 0

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, rl: Mapping, sampler: Mapping, **kwargs: Any):
        settings = rl_settings(rl)
        kind = Policy if settings.gkd is None else GkdPolicy
        self.policies = Policies([kind("", settings, sampler["seed"])], sampler)
        super().__init__(network, optimizer, **kwargs)
        self.counts_tokens = False

    def _gradients(self, network, micro_batches, counts):
        """Returns what gives the gradients to the train step: other graphs have added them up."""
        self.graphs = self.policies.train(network, self.weights, [base_of(network)])
        return GivenGradients(self.graphs.gradients)

    def __call__(self, step: Tensor) -> Tuple:
        return self.policies.step(int(step.asnumpy().reshape(-1)[0]), self._update)

    def _update(self, losses: np.ndarray, tokens: np.ndarray) -> Tuple:
        # The loss is one mean already, of all processes: rank 0 tells it. Where no token counts, there is none, and the
        # step is skipped.
        tells = self.policies[0].processes.rank == 0
        loss, count = losses[0] * tells, float(tokens[0] > 0) * tells
        return super().__call__(Tensor(loss, mstype.float32), Tensor(count, mstype.float32))

    def last_record(self) -> StepRecord:
        """Returns what the last step measured."""
        policy = self.policies[0]
        record = super().last_record()
        return record._replace(tokens=policy.tokens, measures=policy.measures, loss_falls=False)
