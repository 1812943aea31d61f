"""Registers mindlora in MindFormers' PyNative Trainer when it is imported; there is nothing to call.

register_path/pynative_bridge.py imports it under MindFormers' own launcher, mindlora-run before it makes the Trainer.
"""

from mindlora.training.classifier import pynative as classifiers  # noqa: F401  importing registers their classes
from mindlora.training.replaced_names import replace_in_pynative

replace_in_pynative()
