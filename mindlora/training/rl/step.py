"""The train step of a run that learns from rewards: answers prompts, rates the answers, and learns from them."""

from typing import Any, Mapping, Tuple

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.training.model.network import base_of
from mindlora.training.rl.gkd import policy_of
from mindlora.training.rl.policies import Policies
from mindlora.training.rl.policy_graphs import GivenGradients
from mindlora.training.rl.settings import rl_settings
from mindlora.training.step.train_step import LoraTrainOneStepCell, StepRecord


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class RlTrainOneStepCell(LoraTrainOneStepCell):
    """LoraTrainOneStepCell for a run with ``rl``; mindlora-run sets it in place of that cell.

    A call samples and rates the answers to a step's prompts, adds up the gradient of the policy's loss over batches of
    rows (Policies), and takes the optimizer's step as LoraTrainOneStepCell does, with its clipping, limits, learning
    rate and record.

    Args:
        rl (dict): The fields of RlSettings.
        sampler (dict): As for Policies, with ``seed``, the run's seed.
        **kwargs: As for LoraTrainOneStepCell.

    Inputs:
        - **step** (Tensor) - int32 [1, 1]: the number of the step, from 0.

    Attributes:
        policies (Policies): The single policy, number 0.

    Raises:
        ConfigError: An argument is out of range, or not supported in the parallel mode.
    """

    # The number of the policy that callbacks see.
    number = 0

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, rl: Mapping, sampler: Mapping, **kwargs: Any):
        self.policies = Policies([policy_of("", rl_settings(rl), sampler["seed"])], sampler)
        super().__init__(network, optimizer, **kwargs)
        self.counts_tokens = False

    def _gradients(self, network, micro_batches, counts):
        """Returns the cell that passes the train step the gradients, which other graphs have added up."""
        self.graphs = self.policies.train(network, self.weights, [base_of(network)])
        return GivenGradients(self.graphs.gradients)

    def __call__(self, step: Tensor) -> Tuple:
        return self.policies.step(int(step.asnumpy().reshape(-1)[0]), self._update)

    def _update(self, losses: np.ndarray, tokens: np.ndarray) -> Tuple:
        # The loss is a mean already, over all processes, and rank 0 alone contributes it; if no token counts, there is
        # none, and the step is skipped.
        contributes = self.policies[0].processes.rank == 0
        loss, count = losses[0] * contributes, float(tokens[0] > 0) * contributes
        return super().__call__(Tensor(loss, mstype.float32), Tensor(count, mstype.float32))

    def last_record(self) -> StepRecord:
        """Returns the measurements of the last step."""
        policy = self.policies[0]
        record = super().last_record()
        return record._replace(tokens=policy.tokens, measures=policy.measures, loss_falls=False)
