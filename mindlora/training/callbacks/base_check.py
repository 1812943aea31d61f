"""BaseCheck: compares the base that adapter_path was trained on with load_checkpoint, before the first step."""

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.training.callbacks.common import register
from mindlora.training.model.network import check_loaded_base


@register
class BaseCheck(Callback):
    """Compares the base that pet_config.adapter_path was trained on with the one that MindFormers has loaded.

    mindlora-run adds it to a training or evaluation run with adapter_path; LoraCheckpoint makes the same comparison.
    (In a prediction run, the network compares the bases before its first answer.)
    """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Compares the two bases before the first step; raises BaseMismatchError if on_base_mismatch says so."""
        check_loaded_base(run_context.original_args().train_network)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Compares the two bases before the first batch, as on_train_begin does."""
        check_loaded_base(run_context.original_args().network)
