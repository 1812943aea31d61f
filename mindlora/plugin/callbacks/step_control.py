"""What the callbacks share that change rates, limits or the end of a run."""

from typing import TYPE_CHECKING

from mindspore import Callback, nn
from mindspore.train import RunContext

from mindlora.errors import ConfigError
from mindlora.plugin.graph.network import train_step_of

if TYPE_CHECKING:
    from mindspore.train.callback._callback import InternalCallbackParam


def controlled_step(params: "InternalCallbackParam", name: str) -> nn.Cell:
    """Returns the train step of a run, which must be one that obeys rate factors, limits and requests to stop.

    Args:
        params (InternalCallbackParam): MindSpore's callback parameters.
        name (str): The callback that needs it.

    Raises:
        ConfigError: The run has another train step.
    """
    step = train_step_of(params.train_network)
    if step is None or step.is_mindformers_step:
        raise ConfigError(
            f"{name} needs mindlora's train step, alone or in data parallel. Set runner_wrapper.type: "
            f"LoraTrainOneStepCell and parallel.parallel_mode: 0, or remove {name} from callbacks."
        )
    return step


def check_is_measured(params: "InternalCallbackParam", name: str, metric: str) -> None:
    """Raises ConfigError if a callback waits for held_out_loss, and no HeldOutLoss measures it."""
    listed = {type(callback).__name__ for callback in params.list_callback}
    if metric == "held_out_loss" and "HeldOutLoss" not in listed:
        raise ConfigError(f"{name} needs held_out_loss, which nothing measures: add HeldOutLoss to callbacks.")


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

    def update(self, params: "InternalCallbackParam") -> None:
        """Changes ``factor`` after a step, and reports it."""
        raise NotImplementedError

    def _set(self, params):
        name = type(self).__name__
        step = controlled_step(params, name)
        if step.rate_factors.get(name) != self.factor:
            step.set_rate_factor(name, self.factor)
