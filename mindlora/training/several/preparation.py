"""Prepares the YAML of a run with several adapters: the shared parts, and a YAML for each adapter."""

import copy
import os
from typing import Any, Dict, Optional, Sequence

from mindformers.core.lr import build_lr
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_output_root_path
from mindspore import Tensor, nn, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.yaml_run import YamlRun
from mindlora.training.rl.step import RlTrainOneStepCell
from mindlora.training.run_configuration import plain
from mindlora.training.several.data import DataOfAdapters, name_data, steps_in_epoch
from mindlora.training.several.rl_step import StackedRlTrainOneStepCell
from mindlora.training.several.rules import OF_ADAPTER, TrainedAdapter, rl_of, trained_adapters, write_to_own_folder
from mindlora.training.several.train_step import StackedAdamW, StackedTrainOneStepCell
from mindlora.training.step.packing import boundary_of

# AdapterRates: the learning-rate schedules of several adapters, as one MindFormers schedule.


@MindFormerRegister.register(MindFormerModuleType.LR, legacy=True)
class AdapterRates(LearningRateSchedule):
    """A MindFormers or MindSpore schedule for each of K adapters, which differ in their learning_rate.

    Args:
        schedule (str): The schedules' type, as in lr_schedule.
        learning_rates (sequence of float): Each adapter's learning_rate, of the type of lr_schedule.learning_rate.
        learning_rate (float): The learning_rate of lr_schedule, which need not be any adapter's.
        own_total_steps (sequence of int, optional): Each adapter's total_steps, if they differ. Default: None, they do
            not.
        **keys: The schedules' other keys.

    Inputs:
        - **global_step** (Tensor) - int32 [K, 1]: the step of each adapter.

    Outputs:
        float32 [K].
    """

    def __init__(
        self,
        schedule: str,
        learning_rates: Sequence[float],
        learning_rate: float,
        own_total_steps: Optional[Sequence[int]] = None,
        **keys: Any,
    ):
        super().__init__()
        self.learning_rate = learning_rate
        schedules = []
        for adapter, rate in enumerate(learning_rates):
            if own_total_steps is not None:
                keys["total_steps"] = own_total_steps[adapter]
            schedules.append(build_lr(class_name=schedule, learning_rate=rate, **keys))
        self.schedules = nn.CellList(schedules)

    def construct(self, global_step: Tensor) -> Tensor:
        rates = ()
        for adapter, schedule in enumerate(self.schedules):
            rates += (schedule(global_step[adapter]).reshape(()),)
        return ops.stack(rates)


MindFormerRegister.register_cls(StackedAdamW, MindFormerModuleType.OPTIMIZER, legacy=True)


def prepare_adapters(config: MindFormerConfig) -> None:
    """Turns a YAML with pet_config.adapters into one that MindFormers builds the shared run from, in place.

    The YAML must have passed the checks, and its callbacks must be sorted.
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
    _prepare_data(config, adapters)
    config.optimizer.type = StackedAdamW.__name__
    _prepare_step(config.runner_wrapper, runs)
    shared = [callback for callback in config.callbacks if callback.get("type") not in OF_ADAPTER]
    saving = next((callback for callback in config.callbacks if callback.get("type") == "LoraCheckpoint"), {})
    directory = os.path.abspath(saving.get("directory") or get_output_root_path())
    config.callbacks = [*shared, MindFormerConfig(type="EachAdapter", runs=runs, directory=directory)]


def _prepare_step(wrapper, runs):
    """Replaces the train step of one adapter with the step of all adapters."""
    if wrapper.type == RlTrainOneStepCell.__name__:
        nodes = [run["configuration"]["runner_wrapper"]["rl"] for run in runs]
        wrapper.adapters = [{"name": run["name"], "rl": node} for run, node in zip(runs, nodes)]
        wrapper.type = StackedRlTrainOneStepCell.__name__
    else:
        wrapper.type = StackedTrainOneStepCell.__name__


def _prepare_data(config, adapters):
    """Makes the run read all adapters' data, if some have their own; each trains as long as it would alone."""
    data = [adapter.data for adapter in adapters]
    if not any(data):
        return
    shared = YamlRun(config).train_data
    # All rows go through one network, which either keeps a row's examples apart or does not.
    boundary_of([file for path in data for file in mindrecord_files(path or shared)])
    config.train_dataset_task.task = config.train_dataset_task.type
    config.train_dataset_task.type = DataOfAdapters.__name__
    config.train_dataset_task.data = data
    if config.lr_schedule.get("total_steps") in (None, -1):
        rows = config.runner_config.batch_size
        steps = [steps_in_epoch(config.train_dataset, path or shared, rows) for path in data]
        config.lr_schedule.own_total_steps = [config.runner_config.epochs * each for each in steps]


def alone(configuration: Dict[str, Any], adapter: TrainedAdapter) -> Dict[str, Any]:
    """Returns the YAML of a run with only this adapter, which writes to a folder of the adapter's name."""
    configuration = copy.deepcopy(configuration)
    pet_config = configuration["model"]["model_config"]["pet_config"]
    del pet_config["adapters"]
    pet_config.update(adapter.own)
    if adapter.learning_rate is not None:
        configuration["lr_schedule"]["learning_rate"] = adapter.learning_rate
    if adapter.rl:
        configuration["runner_wrapper"]["rl"] = rl_of(configuration["runner_wrapper"]["rl"], adapter)
    if adapter.data is not None:
        name_data(configuration["train_dataset"], adapter.data)
    write_to_own_folder(configuration["callbacks"], adapter.name, get_output_root_path())
    return configuration
