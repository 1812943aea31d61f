"""Registers all of mindlora in MindFormers when it is imported; there is nothing to call.

Importing this module enters the pet type, the classifiers, the train step, the callbacks and LoRA+'s schedule in
MindFormers' registry, so that a YAML can name them. mindlora-run imports it before the Trainer is built, and
register_path/bridge.py under MindFormers' own launcher. No other module of mindlora registers the pet type.
"""

from mindlora.plugin import callbacks  # noqa: F401  importing registers their classes
from mindlora.plugin.graph import classifiers, lora_plus, pet, train_step  # noqa: F401  importing registers their classes
from mindlora.plugin.graph.replaced_names import allow_data_parallel

pet.register()
allow_data_parallel()
