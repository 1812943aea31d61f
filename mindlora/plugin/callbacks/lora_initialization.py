"""LoraInitialization: a lora_init that changes the base, carried out once the base is loaded."""

from mindspore import Callback

from mindlora.initialize import initialize_adapters
from mindlora.plugin.callbacks.common import register
from mindlora.plugin.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.plugin.network import base_of


@register
class LoraInitialization(Callback):
    """Carries out a lora_init that changes the base, once the base is loaded; only for runs without LoraCheckpoint."""

    def on_train_begin(self, run_context):
        params = run_context.original_args()
        # Which resumes where a run stopped, or else starts itself.
        if not any(isinstance(callback, LoraCheckpoint) for callback in params.list_callback):
            initialize_adapters(base_of(params.train_network))


@register
class LoraStart(LoraInitialization):
    """The name that LoraInitialization had in version 0.1, for YAMLs that were written then."""
