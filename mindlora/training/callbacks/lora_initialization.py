"""LoraInitialization: initializes adapters whose lora_init is computed from the base."""

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.network.initialize import initialize_adapters
from mindlora.training.callbacks.common import register
from mindlora.training.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.training.model.network import base_of


@register
class LoraInitialization(Callback):
    """Initializes adapters whose lora_init is computed from the base (pissa, olora, mica), once the base is loaded.

    LoraCheckpoint does this too, so only a run without it needs this callback. mindlora-run adds it automatically.
    """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Initializes the adapters."""
        params = run_context.original_args()
        # LoraCheckpoint resumes the run or initializes the adapters itself.
        if not any(isinstance(callback, LoraCheckpoint) for callback in params.list_callback):
            initialize_adapters(base_of(params.train_network))
