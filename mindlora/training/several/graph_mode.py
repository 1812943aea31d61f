"""Several adapters in graph mode: the run's YAML, its data and schedules, and the step that learns from rewards."""

import atexit
import copy
import os
import threading
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindformers.core.lr import build_lr
from mindformers.dataset import build_dataset
from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_output_root_path
from mindspore import Tensor, nn, ops
from mindspore.common import dtype as mstype
from mindspore.dataset import Dataset
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.yaml_run import YamlRun
from mindlora.training.model.network import innermost
from mindlora.training.rl.gkd import policy_of
from mindlora.training.rl.graph_mode import RlTrainOneStepCell
from mindlora.training.rl.policies import Policies
from mindlora.training.rl.settings import rl_settings
from mindlora.training.run_configuration import plain
from mindlora.training.several.rules import OF_ADAPTER, TrainedAdapter, rl_of, trained_adapters, write_to_own_folder
from mindlora.training.several.stack import pull
from mindlora.training.several.train_step import StackedAdamW, StackedStep, StackedTrainOneStepCell, UpdatesOfAdapters
from mindlora.training.step.packing import boundary_of
from mindlora.training.step.train_step import StepRecord

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


# Training data: each batch has rows for every adapter

# More than any run has: MindSpore can start within the data only if its size is known.
_EPOCHS = 2**24


@MindFormerRegister.register(MindFormerModuleType.DATASET, legacy=True)
class DataOfAdapters:
    """A dataset of [rows, K, N] for K adapters, each of which gets the batches of a run with it alone.

    An epoch is an epoch of the longest data. Shorter data begins its next epoch meanwhile, as in a run alone.

    Args:
        dataset_config (MindFormerConfig): As for ``task``.
        task (str): The task with which MindFormers builds the dataset of one adapter.
        data (sequence of str or None): Each adapter's own MindRecord; None for dataset_config's.
        first_step (int): The step of the run after which the data starts. Default: 0.
    """

    def __new__(
        cls, dataset_config: MindFormerConfig, task: str, data: Sequence[Optional[str]], first_step: int = 0
    ) -> Dataset:
        datasets = []
        for path in data:
            own = copy.deepcopy(dataset_config)
            if path:
                name_data(own, path)
            datasets.append(build_dataset({"type": task, "dataset_config": own}))
            datasets[-1].set_init_step(first_step)
        # In this process, because the reader of the rows must continue where it was in each epoch.
        batches = Batches(datasets, first_step)
        columns = list(dataset_config.input_columns)
        return ms.dataset.GeneratorDataset(
            batches, columns, num_parallel_workers=1, shuffle=False, python_multiprocessing=False
        )


class Batches:
    """The batches of an epoch of several datasets, by number, from first to last; MindSpore requests them in order.

    Attributes:
        datasets (list of Dataset): Datasets of batches [rows, N], one for each adapter.
    """

    def __init__(self, datasets: List[Dataset], first_step: int):
        self.datasets = datasets
        self._step = first_step
        self._iterators = [without_end(dataset) for dataset in datasets]
        self._last: Tuple[np.ndarray, ...] = ()
        self._is_closed = False
        self._reading = threading.Lock()
        # When the process ends, MindSpore releases the datasets while one of its threads still reads ahead from them.
        atexit.register(self.close)

    def __len__(self) -> int:
        return max(dataset.get_dataset_size() for dataset in self.datasets)

    def __getitem__(self, number: int) -> Tuple[np.ndarray, ...]:
        with self._reading:
            is_next = self._step % len(self) == number or not self._last
            # Otherwise, a resumed run skips the batches that it has seen.
            if is_next and not self._is_closed:
                columns = zip(*(next(iterator) for iterator in self._iterators))
                self._last = tuple(np.stack(column, 1) for column in columns)
                self._step += 1
            return self._last

    def close(self) -> None:
        """Stops reading from the datasets: the last batch is returned from now on."""
        with self._reading:
            self._is_closed = True


def without_end(dataset: Dataset) -> Iterator[Tuple[np.ndarray, ...]]:
    """Yields the batches of one epoch after another."""
    epochs = dataset.create_tuple_iterator(num_epochs=_EPOCHS, output_numpy=True)
    while True:
        yield from epochs


def datasets_of(train_dataset: Dataset, count: int) -> List[Dataset]:
    """Returns the dataset of each adapter's run alone."""
    batches = getattr(train_dataset, "source", None)
    return batches.datasets if isinstance(batches, Batches) else [train_dataset] * count


def name_data(dataset_config: MindFormerConfig, path: str) -> None:
    """Makes a run read its data from a MindRecord, or a folder of them."""
    dataset_config["data_loader"].pop("dataset_files", None)
    dataset_config["data_loader"]["dataset_dir"] = path


def steps_in_epoch(dataset_config: MindFormerConfig, path: str, batch_size: int) -> int:
    """Returns the number of complete batches in a MindRecord, or a folder of them."""
    samples = dataset_config["data_loader"].get("num_samples")
    rows = ms.dataset.MindDataset(mindrecord_files(path), num_samples=samples).get_dataset_size()
    return rows // batch_size


# Learning from rewards: each adapter from its own answers


class UpdatesOfPolicies(UpdatesOfAdapters):
    """UpdatesOfAdapters of adapters that learn from rewards.

    Attributes:
        policies (Policies): One for each adapter.
    """

    policies: Policies

    def record_of(self, adapter: int) -> StepRecord:
        """Returns one adapter's measurements in the last step."""
        return super().record_of(adapter)._replace(measures=self.policies[adapter].measures, loss_falls=False)

    def stop(self, adapter: int) -> None:
        """Stops an adapter's learning and sampling."""
        super().stop(adapter)
        self.policies.end(adapter)


@MindFormerRegister.register(MindFormerModuleType.WRAPPER, legacy=True)
class StackedRlTrainOneStepCell(UpdatesOfPolicies, StackedStep):
    """A train step in which each of K adapters takes the same step as alone with RlTrainOneStepCell.

    mindlora-run sets this cell in the YAML of a run with ``rl`` and pet_config.adapters.

    Args:
        network, optimizer: As for StackedStep.
        adapters (list of dict): Each adapter's ``name`` and ``rl``, the fields of its RlSettings.
        sampler (dict): As for RlTrainOneStepCell.
        **kwargs: As for StackedStep.

    Inputs:
        - **step** (Tensor) - int32 [1, 1]: the number of the step, from 0.

    Outputs:
        As in StackedTrainOneStepCell.
    """

    UNREAD_BY_GRAPHS = ("policies",)

    def __init__(
        self, network: nn.Cell, optimizer: StackedAdamW, adapters: Sequence[Mapping], sampler: Mapping, **kwargs: Any
    ):
        super().__init__(network, optimizer, **kwargs)
        seed = sampler["seed"]
        self.policies = Policies([policy_of(each["name"], rl_settings(each["rl"]), seed) for each in adapters], sampler)
        stack = innermost(network, lambda cell: hasattr(cell, "stack")).stack
        self.graphs = self.policies.train(
            network, self.weights, stack.networks, lambda number: pull(stack.slices(number))
        )
        self.gradients = self.graphs.gradients
        self.ones = Tensor(np.ones(self.adapters), mstype.float32)
        self.scale = Tensor(self.scale_sense, mstype.float32)

    def __call__(self, step: Tensor) -> Tuple:
        return self.policies.step(int(step.asnumpy().reshape(-1)[0]), self._update)

    def _update(self, losses: np.ndarray, tokens: np.ndarray) -> Tuple:
        return super().__call__(Tensor(losses, mstype.float32), Tensor(tokens, mstype.float32))

    def construct(self, losses: Tensor, tokens: Tensor) -> Tuple:
        # The losses are means already; if no token counts, there is none, and the adapter's step is skipped.
        loss, is_skipped, rate, norm = self.update(losses, tokens, self.gradients, self.ones)
        return loss, is_skipped, self.scale, rate, norm
