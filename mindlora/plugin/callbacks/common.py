"""What the callbacks share: registration in MindFormers, the loss of a step, a check of their arguments."""

from typing import TYPE_CHECKING, Any

from mindformers.core.callback.callback import _get_loss_output
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from mindlora.errors import ConfigError

if TYPE_CHECKING:
    from mindspore.train.callback._callback import InternalCallbackParam

register = MindFormerRegister.register(MindFormerModuleType.CALLBACK, legacy=True)


def loss_of(params: "InternalCallbackParam") -> float:
    """Returns the training loss of the step that MindSpore's callback parameters describe."""
    return float(_get_loss_output(params.net_outputs)[0])


def check_count(name: str, value: Any) -> None:
    """Raises ConfigError unless ``value`` is a whole number of at least 1."""
    # MindFormers puts the callback's class before the message of an error in its constructor.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number of at least 1.")
