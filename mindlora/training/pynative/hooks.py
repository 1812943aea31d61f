"""Registers mindlora in MindFormers' PyNative Trainer when imported; there is nothing to call.

Under MindFormers' own launcher, register_path/pynative_bridge.py imports it; mindlora-run does so before it makes the
Trainer.
"""

from mindlora.training.classifier import pynative as classifiers  # noqa: F401  importing registers their classes
from mindlora.training.replaced_names import replace_in_pynative

replace_in_pynative()
