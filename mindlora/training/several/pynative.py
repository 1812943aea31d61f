"""Several adapters under MindFormers' PyNative Trainer: in its model, optimizer, data and step."""

import copy
import functools
import importlib
import os
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import mindspore as ms
import numpy as np
from mindformers.tools.utils import get_output_root_path
from mindspore import Parameter, Tensor, nn, ops
from mindspore.graph.api import _no_grad
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindlora.core.errors import ConfigError, DataError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.training.callbacks.registry import ORDER
from mindlora.training.pynative.configuration import adapter_configuration
from mindlora.training.pynative.train_step import TrainStep, refuse_missing_gradients, shifted
from mindlora.training.run_configuration import plain
from mindlora.training.several.preparation import AdapterRates
from mindlora.training.several.rules import OF_ADAPTER, adapters_of, alone_in_pynative
from mindlora.training.several.stack import AdapterStack, stack_adapters
from mindlora.training.several.train_step import AdapterLosses, UpdateOfEach, UpdatesOfAdapters, rows_for_each

require_mindformers("2.0")
from mindformers.pynative.loss.loss import CrossEntropyLoss  # noqa: E402
from mindformers.pynative.optimizer.adamw import AdamW  # noqa: E402

_SEVERAL = "mindlora_adapters"
_UTILS = "mindformers.pynative.trainer.utils"


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


def put_adapters(model: nn.Cell, settings: Any, lora_config: Any) -> List[str]:
    """Puts the adapters of pet_config on a model that has no values yet, in place; returns the paths of their cells.

    Callbacks of which each adapter has its own are removed from ``settings``.

    Args:
        model (nn.Cell): The model.
        settings (TrainConfig): The Trainer's configuration.
        lora_config (LoraConfig): Its lora_config.

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
    cells = {id(cell) for cell in stack.cells.values()}
    return [path for path, cell in model.cells_and_names() if id(cell) in cells]


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
        self.gpt.loss = _TokenLosses(self.gpt.loss, self.stack.count)

    @property
    def adapted(self) -> nn.Cell:
        """The network of the first adapter."""
        return self.stack.networks[0]

    def rows(self, inputs: Mapping[str, Any]) -> Dict[str, Any]:
        """Returns a micro-batch in the loss's form: the rows of all adapters, the first adapter's first."""
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
        """Returns the number of tokens of a micro-batch from ``rows`` that each adapter's loss counts: [K]."""
        return self.is_counted(inputs).reshape((self.stack.count, -1)).sum(-1)

    def loss(self, inputs: Mapping[str, Any], micro_batches: int, compute: Callable) -> Tensor:
        """Returns the mean loss of the learning adapters; the gradient is that of their losses' sum."""
        rows = self.rows(inputs)
        tokens = self.counted_tokens(rows)
        self.tokens = self.tokens + tokens
        totals, _ = compute(rows)
        expected = tokens if self.expected is None else self.expected
        losses = totals / Tensor(np.maximum(expected, 1), ms.float32)
        self.losses.append(ops.stop_gradient(losses))
        learns = self.updates.stopped == 0
        # Selected, not multiplied: a stopped adapter's loss may be NaN.
        losses = ops.select(learns, losses, ops.zeros_like(losses)) * micro_batches
        total = losses.sum()
        return total + ops.stop_gradient(total / max(int(learns.asnumpy().sum()), 1) - total)

    def before_update(self, parameters: Sequence[Parameter]) -> float:
        """Takes the adapters' steps in place of the Trainer; returns their largest gradient norm."""
        refuse_missing_gradients(parameters)
        with _no_grad():
            losses = functools.reduce(ops.add, self.losses)
            counts = Tensor(self.tokens, ms.float32)
            gradients = tuple(parameter.grad for parameter in parameters)
            _, _, _, norm = self.updates.update(losses, counts, gradients, ops.ones_like(losses))
        return float(norm.asnumpy()[0])

    def end(self, loss: float, norm: float, skipped: bool) -> None:
        """Records the step."""
        self.record = self.updates.last_record()
