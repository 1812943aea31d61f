"""Several adapters under MindFormers' PyNative Trainer: in its model, data, optimizer, losses and step."""

import copy
import functools
import importlib
import os
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindformers.tools.utils import get_output_root_path
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import Dataset
from mindspore.graph.api import _no_grad
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.core.errors import ConfigError, DataError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.network.tree import Tree
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.training.callbacks.registry import ORDER
from mindlora.training.held_out.rows import filled_batches
from mindlora.training.preference.loss import SUMS, PreferenceLoss, answer_tokens, preference_measures
from mindlora.training.preference.settings import PreferenceSettings
from mindlora.training.pynative.configuration import adapter_configuration
from mindlora.training.pynative.initialization import learn
from mindlora.training.pynative.train_step import TrainStep, gradient_of, refuse_missing_gradients, shifted
from mindlora.training.resume.collectives import rank_count, sum_over_ranks
from mindlora.training.rl.pynative import PyNativePolicyGraphs, pynative_policies
from mindlora.training.run_configuration import plain
from mindlora.training.several.graph_mode import AdapterRates, UpdatesOfPolicies, without_end
from mindlora.training.several.rules import OF_ADAPTER, adapters_of, alone_in_pynative
from mindlora.training.several.stack import AdapterStack, pull, stack_adapters
from mindlora.training.several.step_of_adapter import HeldOutOfAdapters
from mindlora.training.several.train_step import AdapterLosses, UpdateOfEach, UpdatesOfAdapters, of_each, rows_for_each

require_mindformers("2.0")
from mindformers.pynative.loss.loss import CrossEntropyLoss  # noqa: E402
from mindformers.pynative.optimizer.adamw import AdamW  # noqa: E402

# The losses of preferences


class _Given(nn.Cell):
    """In the place of a network of PreferenceLoss: log-probabilities that have been computed already."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.given: Tuple[Tensor, ...] = ()

    def construct(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.given[0]


class PreferencesOfAdapters:
    """The losses of K adapters on preferences: PreferenceLoss of each adapter's rows.

    Args:
        preference (PreferenceLoss): The model's loss; its rows are those of all adapters, the first adapter's first.
        adapters (int): K.

    Attributes:
        settings (PreferenceSettings): The loss.
    """

    def __init__(self, preference: PreferenceLoss, adapters: int):
        self.network, self.reference = preference.network, preference.reference
        self.settings = preference.settings
        self.adapters = adapters
        self.loss = PreferenceLoss(_Given(), _Given() if self.reference is not None else None, self.settings)

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tuple[List[Tensor], np.ndarray]:
        """Returns the sum of the losses of each adapter's examples, float32 [] each, and their SUMS, [K, len(SUMS)].

        Args:
            inputs (mapping): The columns of preferences, [K batch, ...], those of the first adapter first.
        """
        columns = [inputs[name] for name in self.settings.columns]
        width = columns[0].shape[-1]
        rows = [column.reshape((-1, width)) for column in columns[:2]]
        self._give(self.loss.network, self.network(*rows))
        if self.reference is not None:
            self._give(self.loss.reference, self.reference(*rows))
        batch = columns[0].shape[0] // self.adapters
        policy, reference = self.loss.network.given, getattr(self.loss.reference, "given", ())
        totals, sums = [], []
        for number in range(self.adapters):
            self.loss.network.given = policy[number:]
            if self.reference is not None:
                self.loss.reference.given = reference[number:]
            total, of_adapter = self.loss(*(column[number * batch : (number + 1) * batch] for column in columns))
            totals.append(total)
            sums.append(of_adapter.asnumpy())
        return totals, np.stack(sums)

    def _give(self, cell, log_probabilities):
        """Gives a cell the log-probabilities of each adapter."""
        cell.given = tuple(log_probabilities.reshape((self.adapters, -1)))


class HeldOutPreferencesOfAdapters(HeldOutOfAdapters):
    """HeldOutOfAdapters of preferences, whose ``rows`` and ``best`` have batches in the place of rows.

    Args:
        preferences (PreferencesOfAdapters): What computes the losses.
    """

    def __init__(self, preferences: PreferencesOfAdapters):
        super().__init__(None, preferences.adapters)
        self.preferences = preferences
        # Path of the data -> SUMS of each adapter.
        self.sums: Dict[str, np.ndarray] = {}

    def measures(self, adapter: int, dataset_dir: str, batch_size: int) -> Dict[str, float]:
        """Returns the mean loss of an adapter's examples, and MEASURES."""
        loss = self.loss(adapter, dataset_dir, batch_size)
        return {"loss": loss, **preference_measures(self.sums[dataset_dir][adapter], self.preferences.settings)}

    def _measure(self, dataset_dir, batch_size):
        columns = list(self.preferences.settings.columns)
        dataset = ms.dataset.MindDataset(dataset_dir, columns_list=columns, shuffle=False)
        losses, counts, sums = [], [], np.zeros((self.preferences.adapters, len(SUMS)))
        model = self.preferences.network
        model.set_train(False)
        # As in held_out_preferences.
        for _, inputs in filled_batches(dataset, batch_size, (None, None, -1, 0)):
            batch = {name: of_each(column, self.preferences.adapters, False) for name, column in zip(columns, inputs)}
            totals, of_batch = self.preferences(batch)
            losses.append([float(total.asnumpy()) for total in totals])
            counts.append(of_batch[0][0])
            sums += of_batch
        model.set_train(True)
        self.sums[dataset_dir] = sums
        return np.array(losses).T, np.array(counts)


_SEVERAL = "mindlora_adapters"
_UTILS = "mindformers.pynative.trainer.utils"


# The adapters on the model


class Several(NamedTuple):
    """The parts that train a model with several adapters.

    Attributes:
        stack (AdapterStack): The adapters, by number in the order of pet_config.adapters.
        runs (list of dict): The adapters' runs, as for EachAdapter.
        data (list of str or None): Each adapter's own MindRecord; None for train_dataset's.
        directory (str): The folder of adapters.json.
        schedule (dict): lr_scheduler of the YAML, with MindFormers' additions.
        max_norm (float): training.max_norm.
    """

    stack: AdapterStack
    runs: List[Dict[str, Any]]
    data: List[Optional[str]]
    directory: str
    schedule: Dict[str, Any]
    max_norm: float


def several_of(model: nn.Cell) -> Optional[Several]:
    """Returns the parts that train a model with several adapters, or None if it has one adapter."""
    return getattr(model, _SEVERAL, None)


def put_adapters(
    model: nn.Cell, settings: Any, lora_config: Any, preference: Optional[PreferenceSettings] = None
) -> List[str]:
    """Puts the adapters of pet_config on a model that has no values yet, in place; returns the paths of their cells.

    Callbacks of which each adapter has its own are removed from ``settings``.

    Args:
        model (nn.Cell): The model.
        settings (TrainConfig): The Trainer's configuration.
        lora_config (LoraConfig): Its lora_config.
        preference (PreferenceSettings, optional): What they learn from preferences. Default: None, they learn labels.

    Raises:
        LoraError: As in trained_adapters and stack_adapters, or the rows of all adapters balance routed experts.
    """
    _check_balance(model.get_gpt_transformer_config())
    yaml = plain(settings.to_dict())
    of_adapter = [node for node in yaml["callbacks"] if node["type"] in OF_ADAPTER]
    yaml["callbacks"] = sorted(of_adapter, key=lambda node: ORDER.index(node["type"]))
    adapters = adapters_of(yaml)
    output = os.path.abspath(get_output_root_path())
    saving = next((node for node in yaml["callbacks"] if node["type"] == "LoraCheckpoint"), {})
    directory = os.path.abspath(saving.get("directory") or output)
    runs = []
    for adapter in adapters:
        configuration = alone_in_pynative(yaml, adapter, output)
        runs.append({"name": adapter.name, "settings": plain(adapter.settings), "configuration": configuration})
    configs = [_configuration(model, lora_config, run["configuration"]) for run in runs]
    with _no_grad():
        stack = stack_adapters(model, configs, [config.seed for config in configs])
    settings.callbacks = [callback for callback in settings.callbacks if callback.type not in OF_ADAPTER]
    data = [adapter.data for adapter in adapters]
    schedule = {**settings.lr_scheduler.to_dict(), "total_steps": settings.training.steps}
    setattr(model, _SEVERAL, Several(stack, runs, data, directory, schedule, settings.training.max_norm))
    learn(model, preference)
    cells = {id(cell) for cell in stack.cells.values()}
    return [path for path, cell in Tree(model).cells.items() if id(cell) in cells]


def _check_balance(config: Any) -> None:
    """Raises ConfigError if a model balances its routed experts, for which MindFormers counts all rows' tokens."""
    is_biased = getattr(config, "moe_router_enable_expert_bias", False)
    settings = {
        "moe_aux_loss_coeff": getattr(config, "moe_aux_loss_coeff", None),
        "moe_router_bias_update_rate": config.moe_router_bias_update_rate if is_biased else None,
    }
    for name, value in settings.items():
        if value and getattr(config, "num_moe_experts", None):
            raise ConfigError(
                f"{name} of the model is {value}, and pet_config has adapters: MindFormers balances routed experts by "
                f"the rows of a whole batch, of whichever adapter. Set model.{name}: 0, or train one adapter at a time."
            )


def _configuration(model: nn.Cell, lora_config: Any, alone: Mapping[str, Any]) -> PetLoraConfig:
    """Returns an adapter's configuration, from the YAML of a run with it alone."""
    own = copy.copy(lora_config)
    for name in ("lora_rank", "lora_alpha"):
        setattr(own, name, alone["lora_config"].get(name, getattr(own, name)))
    return adapter_configuration(model, own, alone["pet_config"])


# The optimizer


class StackedPyNativeAdamW(UpdateOfEach, AdamW):
    """MindFormers' AdamW for the parameters of several adapters, with the update of StackedAdamW.

    16-bit parameters have float32 copies, and the moments have the same names, as in MindFormers' AdamW.

    Args:
        params (list): Groups of parameters [K, ...], as for MindFormers' AdamW.
        learning_rate (LearningRateSchedule): Returns the rates float32 [K] for steps int32 [K, 1].
        **keys: As for MindFormers' AdamW.

    Inputs and outputs are those of StackedAdamW.
    """

    def __init__(self, params: Sequence[Mapping[str, Any]], learning_rate: LearningRateSchedule, **keys: Any):
        super().__init__(params, learning_rate=learning_rate, **keys)
        adapters = self.parameters[0].shape[0]
        self.global_step = Parameter(Tensor(np.zeros((adapters, 1)), ms.int32), "global_step", requires_grad=False)
        self.weights = self.fp32_params
        self.decays = self.decays_of_groups()

    def construct(self, gradients: Sequence[Tensor], rates: Tensor, applied: Tensor) -> Any:
        updated = self.update(gradients, rates, applied)
        self._copy_main_params_to_model_params()
        return updated


def with_stacked_optimizer(build_optimizer: Callable) -> Callable:
    """Wraps MindFormers' function that builds the optimizer, so that it updates several adapters if there are any."""

    @functools.wraps(build_optimizer)
    def build(config: Any, model: Sequence[nn.Cell], learning_rate: LearningRateSchedule) -> nn.Optimizer:
        several = several_of(model[0])
        if several is None:
            return build_optimizer(config, model, learning_rate)
        keys = dict(several.schedule)
        rates = [run["configuration"]["lr_scheduler"]["learning_rate"] for run in several.runs]
        schedule = AdapterRates(schedule=keys.pop("type"), learning_rates=rates, **keys)
        utils = importlib.import_module(_UTILS)
        # The name is replaced while the optimizer is built.
        utils.AdamW = StackedPyNativeAdamW
        try:
            return build_optimizer(config, model, schedule)
        finally:
            utils.AdamW = AdamW

    return build


# The step


class _TokenLosses(AdapterLosses):
    """AdapterLosses from the parts of a PyNative model's CrossEntropyLoss."""

    def __init__(self, loss: CrossEntropyLoss, adapters: int):
        nn.Cell.__init__(self)
        self.log_softmax = loss.log_softmax
        self.negative_log_likelihood = loss.nll_loss
        self.adapters = adapters

    def construct(self, logits: Tensor, labels: Tensor, mask: Tensor) -> Tuple[Tensor, Tensor]:
        # Labels and mask are [K rows, N] here.
        return super().construct(logits, labels, mask.reshape((-1,)))

    def of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.negative_log_likelihood(self.log_softmax(logits), labels)


class StackedStep(TrainStep):
    """A TrainStep for the model and optimizer of a Trainer that trains several adapters.

    Args:
        model (nn.Cell): The undivided model, with the adapters of put_adapters.
        optimizer (StackedPyNativeAdamW): The optimizer of their parameters.
    """

    kind_of_updates = UpdatesOfAdapters

    def __init__(self, model: nn.Cell, optimizer: StackedPyNativeAdamW):
        super().__init__(model, optimizer)
        several = several_of(model)
        self.stack = several.stack
        self.updates = self.kind_of_updates(optimizer, several.max_norm)
        self.has_own_data = any(several.data)
        self.preferences = None
        if self.preference is not None:
            self.preferences = PreferencesOfAdapters(self.preference, self.stack.count)
        else:
            self.gpt.loss = _TokenLosses(self.gpt.loss, self.stack.count)

    @property
    def adapted(self) -> nn.Cell:
        """The network of the first adapter."""
        return self.stack.networks[0]

    def rows(self, inputs: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns a micro-batch in the loss's form: the rows of all adapters, the first adapter's first."""
        if self.preferences is not None:
            return {name: of_each(column, self.stack.count, self.has_own_data) for name, column in inputs.items()}
        for name, column in inputs.items():
            if column.ndim not in (2, 3):
                raise DataError(
                    f"The column {name} of the data has rows of shape {list(column.shape[1:])}, and several adapters "
                    "train on columns of one number for each token. Leave it out of column_names."
                )
        return shifted(
            {name: rows_for_each(column, self.stack.count) for name, column in inputs.items()}, self.gpt.seq_length
        )

    def counted_tokens(self, inputs: Mapping[str, Any]) -> np.ndarray:
        """Returns the number of tokens of a micro-batch from ``rows`` that each adapter's loss counts: [K].

        Where they learn from preferences, examples are counted.
        """
        if self.preferences is not None:
            marks = inputs[self.preference.settings.kind.columns[-1]].asnumpy()
            return (marks != 0).reshape((self.stack.count, -1)).sum(-1)
        return self.is_counted(inputs).reshape((self.stack.count, -1)).sum(-1)

    def loss(self, inputs: Mapping[str, Any], micro_batches: int, compute: Callable) -> Tensor:
        """Returns the mean loss of the learning adapters; the gradient is that of their losses' sum."""
        rows = self.rows(inputs)
        tokens = self.counted_tokens(rows)
        self.tokens = self.tokens + tokens
        if self.preferences is not None:
            of_adapters, sums = self.preferences(rows)
            totals = ops.stack(of_adapters)
            self.sums = self.sums + sums
        else:
            totals, _ = compute(rows)
        expected = tokens if self.expected is None else self.expected
        losses = totals / Tensor(np.maximum(expected, 1), ms.float32)
        self.losses.append(ops.stop_gradient(losses))
        learns = self.updates.stopped == 0
        # Selected, not multiplied: a stopped adapter's loss may be NaN. MindFormers takes the mean of the micro-batches
        # and of the ranks.
        losses = ops.select(learns, losses, ops.zeros_like(losses)) * (micro_batches * rank_count())
        total = losses.sum()
        return total + ops.stop_gradient(total / max(int(learns.asnumpy().sum()), 1) - total)

    def before_update(self, parameters: Sequence[Parameter]) -> float:
        """Takes the adapters' steps in place of the Trainer; returns their largest gradient norm."""
        refuse_missing_gradients(parameters)
        with _no_grad():
            losses = Tensor(sum_over_ranks(functools.reduce(ops.add, self.losses).asnumpy()), ms.float32)
            counts = Tensor(self.tokens_of_step, ms.float32)
            gradients = tuple(map(gradient_of, parameters))
            _, _, _, norm = self.updates.update(losses, counts, gradients, ops.ones_like(losses))
        return float(norm.asnumpy()[0])

    def end(self, loss: float, norm: float, skipped: bool) -> None:
        """Records the step."""
        if self.preferences is not None:
            settings, sums = self.preference.settings, sum_over_ranks(self.sums.ravel()).reshape(self.sums.shape)
            self.updates.more = [
                {"tokens": float(answer_tokens(each)), "measures": preference_measures(each, settings)} for each in sums
            ]
        self.record = self.updates.last_record()._replace(stop=self.stops)


class StackedRlStep(StackedStep):
    """StackedStep in which each of K adapters takes the step that RlStep would take with it alone.

    Args:
        model, optimizer: As for StackedStep.
        config (mapping): The content of the run's YAML.

    Attributes:
        policies (Policies): One for each adapter.
    """

    kind_of_updates = UpdatesOfPolicies

    def __init__(self, model: nn.Cell, optimizer: StackedPyNativeAdamW, config: Mapping[str, Any]):
        super().__init__(model, optimizer)
        self.policies = self.updates.policies = pynative_policies(config)
        self.policies.train(
            self.evaluated,
            tuple(optimizer.parameters),
            self.stack.networks,
            lambda number: pull(self.stack.slices(number)),
            PyNativePolicyGraphs,
        )
        self.copy_gradients()

    def learned(self, losses: np.ndarray, tokens: np.ndarray) -> None:
        """Takes the loss of each policy, and its tokens that count, float64 [K] each."""
        self.losses.append(Tensor(losses, ms.float32))
        self.tokens = tokens


# The data


class DataOfAdapters:
    """Batches [rows, K, N] for K adapters, each of which gets the batches of a run with it alone.

    It has the interface that the Trainer requires of a dataset. An epoch is an epoch of the longest data.

    Args:
        datasets (list of Dataset): Datasets of batches [rows, N], one for each adapter.
    """

    def __init__(self, datasets: List[Dataset]):
        self.datasets = datasets

    def get_dataset_size(self) -> int:
        """Returns the number of batches in an epoch."""
        return max(dataset.get_dataset_size() for dataset in self.datasets)

    def set_init_step(self, step: int) -> None:
        """Makes the batches begin after ``step`` steps."""
        for dataset in self.datasets:
            dataset.set_init_step(step)

    def create_dict_iterator(self, **_: Any) -> Iterator[Dict[str, Tensor]]:
        """Yields the batches, column -> Tensor, one epoch after another."""
        columns = self.datasets[0].get_col_names()
        for batches in zip(*map(without_end, self.datasets)):
            yield {name: Tensor(np.stack(arrays, 1)) for name, arrays in zip(columns, zip(*batches))}


def with_data_of_adapters(build_dataset: Callable, data_of: Callable) -> Callable:
    """Wraps MindFormers' function that builds a dataset, to include all adapters' data if some have their own.

    ``data_of`` takes a dataset's configuration, and returns each adapter's own MindRecord, or None for the
    configuration's; it returns None if all adapters share one dataset.
    """

    @functools.wraps(build_dataset)
    def build(config: Any, *arguments: Any, **keywords: Any) -> Any:
        data: Optional[Sequence[Optional[str]]] = data_of(config)
        if data is None or not any(data):
            return build_dataset(config, *arguments, **keywords)
        datasets = []
        for path in data:
            own = copy.deepcopy(config)
            if path:
                own.dataloader.dataset_files = path
            datasets.append(build_dataset(own, *arguments, **keywords))
        return DataOfAdapters(datasets)

    return build
