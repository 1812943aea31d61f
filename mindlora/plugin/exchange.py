"""From gradient_exchange, an argument of runner_wrapper in the YAML, to the exchange that the train step uses."""

from typing import Mapping, Union

from mindspore import nn
from mindspore.communication import get_group_size, get_rank

from mindlora.training.exchange import DenseExchange, FlatLayout, Ranks


def build_exchange(setting: Union[str, Mapping], layout: FlatLayout) -> nn.Cell:
    """Returns the exchange for a train step of one of several data-parallel processes.

    Args:
        setting (str or dict): ``gradient_exchange`` of the YAML.
        layout (FlatLayout): The layout of the trained parameters' gradients.

    Raises:
        ConfigError: The setting is wrong.
    """
    return DenseExchange(layout, Ranks(get_rank(), get_group_size()))
