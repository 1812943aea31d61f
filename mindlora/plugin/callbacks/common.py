"""What the callbacks share: registration in MindFormers, the loss of a step, a check of arguments."""

from mindformers.core.callback.callback import _get_loss_output
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from mindlora.errors import ConfigError

register = MindFormerRegister.register(MindFormerModuleType.CALLBACK, legacy=True)


def loss_of(params) -> float:
    """Returns the training loss of the step that MindSpore's callback parameters are of."""
    return float(_get_loss_output(params.net_outputs)[0])


# MindFormers puts the class before the message of an error that a constructor raises.
def check_count(name: str, value) -> None:
    """Raises ConfigError unless ``value`` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}, it must be a whole number of at least 1.")
