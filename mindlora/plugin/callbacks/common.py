"""What the callbacks share: registration in MindFormers, the loss of a step, and a check of arguments."""

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
    # If the constructor of a callback raises, MindFormers puts the name of its class before the message.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, but it must be a whole number of at least 1.")
