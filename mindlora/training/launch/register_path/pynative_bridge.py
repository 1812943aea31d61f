"""The module for ``auto_register: pynative_bridge.Adapters``, to use mindlora under run_mindformer.py --mode 1.

This setting belongs under model, which MindFormers reads before it builds the model and its adapters. MindFormers
copies this file elsewhere before importing it, hence the absolute import.
"""

from mindlora.training.pynative import hooks  # noqa: F401  importing it replaces MindFormers' LoRA


class Adapters:
    """A class for MindFormers' registry, which accepts only classes. It is never instantiated."""
