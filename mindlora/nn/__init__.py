"""The cells that carry adapters."""

from mindlora.nn.dense import LoRADense

__all__ = ["LoRADense"]
