"""The train step of several adapters that learn from rewards, each from its own answers."""

from typing import Any, Mapping, Sequence, Tuple

import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Tensor, nn
from mindspore.common import dtype as mstype

from mindlora.training.model.network import innermost
from mindlora.training.rl.gkd import policy_of
from mindlora.training.rl.policies import Policies
from mindlora.training.rl.settings import rl_settings
from mindlora.training.several.stack import pull
from mindlora.training.several.train_step import StackedAdamW, StackedStep, UpdatesOfAdapters
from mindlora.training.step.train_step import StepRecord


class UpdatesOfPolicies(UpdatesOfAdapters):
    """UpdatesOfAdapters of adapters that learn from rewards.

    Attributes:
        policies (Policies): One for each adapter.
    """

    policies: Policies

    def record_of(self, adapter: int) -> StepRecord:
        """Returns one adapter's measurements in the last step."""
        return super().record_of(adapter)._replace(measures=self.policies[adapter].measures, loss_falls=False)

    def stop(self, adapter: int) -> None:
        """Stops an adapter's learning and sampling."""
        super().stop(adapter)
        self.policies.end(adapter)


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class StackedRlTrainOneStepCell(UpdatesOfPolicies, StackedStep):
    """A train step in which each of K adapters takes the same step as alone with RlTrainOneStepCell.

    mindlora-run sets this cell in the YAML of a run with ``rl`` and pet_config.adapters.

    Args:
        network, optimizer: As for StackedStep.
        adapters (list of dict): Each adapter's ``name`` and ``rl``, the fields of its RlSettings.
        sampler (dict): As for RlTrainOneStepCell.
        **kwargs: As for StackedStep.

    Inputs:
        - **step** (Tensor) - int32 [1, 1]: the number of the step, from 0.

    Outputs:
        As in StackedTrainOneStepCell.
    """

    def __init__(
        self, network: nn.Cell, optimizer: StackedAdamW, adapters: Sequence[Mapping], sampler: Mapping, **kwargs: Any
    ):
        super().__init__(network, optimizer, **kwargs)
        seed = sampler["seed"]
        self.policies = Policies([policy_of(each["name"], rl_settings(each["rl"]), seed) for each in adapters], sampler)
        stack = innermost(network, lambda cell: hasattr(cell, "stack")).stack
        self.graphs = self.policies.train(
            network, self.weights, stack.networks, lambda number: pull(stack.slices(number))
        )
        self.gradients = self.graphs.gradients
        self.ones = Tensor(np.ones(self.adapters), mstype.float32)
        self.scale = Tensor(self.scale_sense, mstype.float32)

    def __call__(self, step: Tensor) -> Tuple:
        return self.policies.step(int(step.asnumpy().reshape(-1)[0]), self._update)

    def _update(self, losses: np.ndarray, tokens: np.ndarray) -> Tuple:
        return super().__call__(Tensor(losses, mstype.float32), Tensor(tokens, mstype.float32))

    def construct(self, losses: Tensor, tokens: Tensor) -> Tuple:
        # The losses are means already; if no token counts, there is none, and the adapter's step is skipped.
        loss, is_skipped, rate, norm = self.update(losses, tokens, self.gradients, self.ones)
        return loss, is_skipped, self.scale, rate, norm
