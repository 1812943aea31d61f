"""BaseWeights: before the first step, loads the base, tensor by tensor, into a network built without values."""

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.network.load_base import load_base
from mindlora.network.tree import lora_cells
from mindlora.training.callbacks.common import register
from mindlora.training.log import logger
from mindlora.training.model.network import base_of


@register
class BaseWeights(Callback):
    """Loads load_checkpoint instead of MindFormers, which holds the complete file beside the network while it loads.

    mindlora-run adds it where plugin.launching.base_loading takes over loading the base. A tensor that the checkpoint
    lacks is an error here; MindFormers would initialize it at random.

    Args:
        path (str): The base, as for load_base.
    """

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def on_train_begin(self, run_context: RunContext) -> None:
        """Loads the base, and initializes everything else: the adapter and the optimizer's states."""
        network = run_context.original_args().train_network
        for note in load_base(base_of(network), self.path):
            logger.info("%s: %s", self.path, note)
        network.init_parameters_data()
        # When the Trainer called set_train, there was no base yet from which to compute DoRA's magnitudes.
        for _, cell in lora_cells(base_of(network)):
            cell.prepare()
