"""Common parts of callbacks: registration, a step's measurements, events, rules that survive a resume, and rates."""

import collections
import math
from typing import Any, Dict, List, Tuple

import numpy as np
from mindformers.core.callback.callback import _get_loss_output
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import Callback, Parameter, Tensor, nn, ops
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number
from mindlora.training.log import logger
from mindlora.training.model.network import collect_state, distribute_state, losses_in_sum, train_step_of
from mindlora.training.resume.training_state import passed, state_parameters, total_steps
from mindlora.training.step.train_step import StepRecord

# The state that a callback restores to undo steps: the adapter and the optimizer, copied on the host.


def copy_state(step: nn.Cell) -> Dict[str, np.ndarray]:
    """Returns copies of the state that mindlora's train step changes: name -> array."""
    collect_state(step)
    return {parameter.name: parameter.asnumpy().copy() for parameter in _state(step)}


def put_back(step: nn.Cell, arrays: Dict[str, np.ndarray]) -> None:
    """Restores the state that copy_state returned to a train step. Its rate factors must then be set again."""
    for parameter in _state(step):
        # set_data would not do: the graph would keep the moments, which it uses only in the branch of steps that count.
        ops.assign(parameter, Tensor(arrays[parameter.name], parameter.dtype))
    distribute_state(step)
    unsent = step.exchange.unsent() if step.exchange is not None else None
    if unsent is not None:
        # The gradients that this rank has not sent yet are from the steps that are undone. -0.0, since x + -0.0 is x
        # for every x.
        ops.assign(unsent, Tensor(np.full(unsent.shape, -0.0, np.float32)))


def _state(step: nn.Cell) -> List[Parameter]:
    """Returns the parameters of the adapter and the optimizer, without the loss scale, which must not be restored."""
    manager = step.loss_scaling_manager
    scale = {step.scale_sense.name} if isinstance(step.scale_sense, Parameter) else set()
    scale.update(p.name for p in (manager.get_parameters() if manager is not None else ()))
    trained = [p for p in step.get_parameters() if p.requires_grad]
    by_name: Dict[str, Parameter] = {p.name: p for p in [*trained, *state_parameters(step)]}
    return [parameter for name, parameter in by_name.items() if name not in scale]


register = MindFormerRegister.register(MindFormerModuleType.CALLBACK, legacy=True)


def loss_of(params: InternalCallbackParam) -> float:
    """Returns the training loss of the step that MindSpore's callback parameters describe."""
    return float(_get_loss_output(params.net_outputs)[0]) / losses_in_sum(params.train_network)


def step_record(params: InternalCallbackParam) -> StepRecord:
    """Returns the measurements of the step that has just ended; only the loss if the train step is not mindlora's."""
    step = train_step_of(params.train_network)
    if step is not None and not step.is_mindformers_step:
        return step.last_record()
    loss = loss_of(params)
    # mindlora's train step skips such a step.
    return StepRecord(math.nan, tokens=0.0, skipped=True) if step is not None and loss == 0 else StepRecord(loss)


def reported_metrics(params: InternalCallbackParam) -> Dict[str, Any]:
    """Returns {metric: value} that callbacks have reported for this step."""
    return dict(params.get("eval_results") or {})


def report_event(params: InternalCallbackParam, kind: str, message: str) -> None:
    """Logs an event of a run, and keeps it in ``training_events`` of MindSpore's parameters for the run's report.

    ``kind`` is one word, such as "rollback"; ``message`` is a sentence.
    """
    logger.info("step %d: %s", params.cur_step_num, message)
    events = params.get("training_events") or []
    params["training_events"] = [*events, {"step": params.cur_step_num, "kind": kind, "message": message}]


def check_mode(name: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` says whether a smaller or a larger metric is better."""
    if value not in ("min", "max"):
        raise ConfigError(f"{name} is {value!r}, but it must be 'min' or 'max'.")


def check_is_measured(params: InternalCallbackParam, name: str, metric: str) -> None:
    """Raises ConfigError if a callback needs held_out_loss and no HeldOutLoss measures it."""
    listed = {type(callback).__name__ for callback in params.list_callback}
    if metric == "held_out_loss" and "HeldOutLoss" not in listed:
        raise ConfigError(f"{name} needs held_out_loss, which nothing measures: add HeldOutLoss to callbacks.")


def controlled_step(params: InternalCallbackParam, name: str) -> nn.Cell:
    """Returns the train step of a run, which must support rate factors, limits and requests to stop.

    Raises ConfigError, naming the callback that needs it, if the run has another train step.
    """
    step = train_step_of(params.train_network)
    if step is None or step.is_mindformers_step:
        raise ConfigError(
            f"{name} needs mindlora's train step, alone or in data parallel. Set runner_wrapper.type: "
            f"LoraTrainOneStepCell and parallel.parallel_mode: 0, or remove {name} from callbacks."
        )
    return step


class Rule:
    """A rule by which a callback decides. A resumed run restores the attributes that ``remembered`` names."""

    remembered: Tuple[str, ...] = ()

    def state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values."""
        state = {name: getattr(self, name) for name in self.remembered}
        for name, value in state.items():
            if isinstance(value, collections.deque):
                state[name] = list(value)
        return state

    def restore(self, state: Dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        for name in self.remembered:
            value = state[name]
            before = getattr(self, name)
            if isinstance(before, collections.deque):
                value = collections.deque(value, before.maxlen)
            setattr(self, name, value)


class RuleCallback(Callback):
    """A callback that decides by ``rule``, whose state a resumed run restores."""

    rule: Any

    def training_state(self) -> Dict[str, Any]:
        """Returns the state that a resumed run needs, as JSON values for LoraCheckpoint's training_state.json."""
        return self.rule.state()

    def restore_training_state(self, state: Dict[str, Any]) -> None:
        """Restores what ``training_state`` returned."""
        self.rule.restore(state)


class RateCallback(Callback):
    """A callback that multiplies the learning rate by ``factor``; a subclass changes it in ``update``."""

    factor = 1.0

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Sets the factor for the next step."""
        # Not when training begins: a resumed run may not have its state by then.
        self._set(run_context.original_args())

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Sets the factor for the next step."""
        params = run_context.original_args()
        self.update(params)
        self._set(params)

    def update(self, params: InternalCallbackParam) -> None:
        """Changes ``factor`` after a step, and reports it."""
        raise NotImplementedError

    def _set(self, params):
        name = type(self).__name__
        step = controlled_step(params, name)
        if step.rate_factors.get(name) != self.factor:
            step.set_rate_factor(name, self.factor)


class PeriodicCallback(Callback):
    """A callback that acts every ``every`` steps, and after the last one.

    ``name`` is the key of ``every`` in the YAML; ConfigError is raised unless it is a whole number of at least 1.
    """

    def __init__(self, name: str, every: int):
        super().__init__()
        check_number(every, name, COUNT)
        self.every = every
        self.step_before = 0

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Records the last step before the epoch."""
        # Not when training begins: a resumed run may not know its step by then.
        self.step_before = run_context.original_args().cur_step_num

    def is_due(self, params: InternalCallbackParam) -> bool:
        """Returns whether the action is due at this step, perhaps the last; a subclass then sets step_before."""
        step = params.cur_step_num
        return step >= total_steps(params) or passed(self.every, self.step_before, step)
