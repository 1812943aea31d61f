"""From gradient_exchange, an argument of runner_wrapper in the YAML, to the exchange that the train step uses."""

from typing import Optional, Sequence, Union

from mindspore import Parameter, nn
from mindspore.communication import GlobalComm, get_group_size, get_rank

from mindlora.training.exchange import DenseExchange, FlatLayout, Ranks


def build_exchange(setting: Optional[Union[str, dict]], parameters: Sequence[Parameter]) -> Optional[nn.Cell]:
    """Returns the exchange for a train step, with its ``layout``; None where this process trains alone.

    Args:
        setting (str or dict): ``gradient_exchange`` of the YAML; None is "dense".
        parameters (Sequence[Parameter]): The trained parameters, in the order of their gradients.

    Raises:
        ConfigError: The setting is wrong.
    """
    if not GlobalComm.INITED or get_group_size() == 1:
        return None
    return DenseExchange(FlatLayout(parameters), Ranks(get_rank(), get_group_size()))
