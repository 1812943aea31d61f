"""What the YAML of a run with several adapters becomes: the parts that they share, and a YAML for each."""

import copy
import os
from typing import Any, Dict

from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_output_root_path

from mindlora.checks.adapters import OF_ADAPTER, TrainedAdapter, trained_adapters
from mindlora.checks.pet_config import PetLoraConfig
from mindlora.plugin.graph.stacked.rates import AdapterRates
from mindlora.plugin.graph.stacked.train_step import StackedTrainOneStepCell
from mindlora.plugin.run_configuration import plain
from mindlora.training.stacked import StackedAdamW

MindFormerRegister.register_cls(StackedAdamW, MindFormerModuleType.OPTIMIZER, legacy=True)
# Arguments of callbacks that name the folder they write to.
_WRITING = {"LoraCheckpoint": "lora_checkpoint", "LossCurve": "", "RunReport": ""}


def prepare_adapters(config: MindFormerConfig) -> None:
    """Turns a YAML with pet_config.adapters into one that MindFormers builds the shared run from, in place.

    The YAML must have no mistakes, and its callbacks be in order.
    """
    pet_config = config.model.model_config.pet_config
    if not (pet_config or {}).get("adapters"):
        return
    adapters = trained_adapters(PetLoraConfig.from_pet_config(pet_config))
    runs = [
        {"name": adapter.name, "settings": plain(adapter.settings), "configuration": alone(plain(config), adapter)}
        for adapter in adapters
    ]
    keys = dict(config.lr_schedule)
    rates = [run["configuration"]["lr_schedule"]["learning_rate"] for run in runs]
    config.lr_schedule = MindFormerConfig(
        **{**keys, "type": AdapterRates.__name__, "schedule": keys["type"], "learning_rates": rates}
    )
    config.optimizer.type = StackedAdamW.__name__
    config.runner_wrapper.type = StackedTrainOneStepCell.__name__
    shared = [callback for callback in config.callbacks if callback.get("type") not in OF_ADAPTER]
    saving = next((callback for callback in config.callbacks if callback.get("type") == "LoraCheckpoint"), {})
    directory = os.path.abspath(saving.get("directory") or get_output_root_path())
    config.callbacks = [*shared, MindFormerConfig(type="EachAdapter", runs=runs, directory=directory)]


def alone(configuration: Dict[str, Any], adapter: TrainedAdapter) -> Dict[str, Any]:
    """Returns the YAML of a run with this adapter alone, which writes to a folder of the adapter's name."""
    configuration = copy.deepcopy(configuration)
    pet_config = configuration["model"]["model_config"]["pet_config"]
    del pet_config["adapters"]
    pet_config.update(adapter.own)
    if adapter.learning_rate is not None:
        configuration["lr_schedule"]["learning_rate"] = adapter.learning_rate
    for callback in configuration["callbacks"]:
        if callback["type"] in _WRITING:
            folder = callback.get("directory") or get_output_root_path()
            callback["directory"] = os.path.join(folder, adapter.name, _WRITING[callback["type"]])
    return configuration
