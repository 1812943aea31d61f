"""Several adapters that train beside each other over one base: the network, each one's part, the optimizer."""

from mindlora.training.stacked.adamw import StackedAdamW
from mindlora.training.stacked.stack import AdapterStack, stack_adapters

__all__ = ["AdapterStack", "StackedAdamW", "stack_adapters"]
