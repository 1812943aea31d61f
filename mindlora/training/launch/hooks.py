"""Registers all of mindlora in MindFormers when it is imported; there is nothing to call.

Importing this module enters the pet type, the classifiers, the train step, the callbacks and LoRA+'s schedule in
MindFormers' registry, so that a YAML can name them. mindlora-run imports it before the Trainer is built, and
register_path/bridge.py under MindFormers' own launcher. No other module of mindlora registers the pet type.
"""

from mindlora.training.callbacks import registry  # noqa: F401  importing registers their classes
from mindlora.training.classifier import model as classifiers  # noqa: F401  importing registers their classes
from mindlora.training.model import pet  # noqa: F401  importing registers their classes
from mindlora.training.replaced_names import replace_in_graph_mode
from mindlora.training.step import lora_plus, train_step  # noqa: F401  importing registers their classes

pet.register()
replace_in_graph_mode()
