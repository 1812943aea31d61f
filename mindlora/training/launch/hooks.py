"""Registers all of mindlora in MindFormers when imported; there is nothing to call.

Importing this module adds the pet type, the classifiers, the train step, the callbacks and LoRA+'s schedule to
MindFormers' registry, so that a YAML can name them. mindlora-run imports it before the Trainer is built; under
MindFormers' own launcher, register_path/bridge.py does. No other module of mindlora registers the pet type.
"""

from mindlora.training.callbacks import registry  # noqa: F401  importing registers their classes
from mindlora.training.classifier import model as classifiers  # noqa: F401  importing registers their classes
from mindlora.training.model import pet  # noqa: F401  importing registers their classes
from mindlora.training.replaced_names import replace_in_graph_mode
from mindlora.training.step import lora_plus, train_step  # noqa: F401  importing registers their classes

pet.register()
replace_in_graph_mode()
