"""The cells."""

from mindlora.nn.dense import LoRADense

__all__ = ["LoRADense"]
