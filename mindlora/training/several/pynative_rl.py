"""The step of several adapters that learn from rewards under MindFormers' PyNative Trainer."""

from typing import Any, Mapping

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindlora.training.rl.pynative import PyNativePolicyGraphs, pynative_policies
from mindlora.training.several.pynative import StackedPyNativeAdamW, StackedStep
from mindlora.training.several.rl_step import UpdatesOfPolicies
from mindlora.training.several.stack import pull


class StackedRlStep(StackedStep):
    """StackedStep in which each of K adapters takes the step that RlStep would take with it alone.

    Args:
        model, optimizer: As for StackedStep.
        config (mapping): The content of the run's YAML.

    Attributes:
        policies (Policies): One for each adapter.
    """

    kind_of_updates = UpdatesOfPolicies

    def __init__(self, model: nn.Cell, optimizer: StackedPyNativeAdamW, config: Mapping[str, Any]):
        super().__init__(model, optimizer)
        self.policies = self.updates.policies = pynative_policies(config)
        self.policies.train(
            self.evaluated,
            tuple(optimizer.parameters),
            self.stack.networks,
            lambda number: pull(self.stack.slices(number)),
            PyNativePolicyGraphs,
        )
        self.copy_gradients()

    def learned(self, losses: np.ndarray, tokens: np.ndarray) -> None:
        """Takes the loss of each policy, and its tokens that count, float64 [K] each."""
        self.losses.append(Tensor(losses, ms.float32))
        self.tokens = tokens
