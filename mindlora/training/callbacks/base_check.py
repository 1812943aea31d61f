"""BaseCheck: before the first step, compares the base that adapter_path was trained on with load_checkpoint."""

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.training.callbacks.common import register
from mindlora.training.model.network import check_loaded_base


@register
class BaseCheck(Callback):
    """Compares the base that pet_config.adapter_path was trained on with the one that MindFormers has loaded.

    mindlora-run adds it to a run with adapter_path that trains or evaluates; LoraCheckpoint does the same. (Where a
    run predicts, the network compares them before its first answer.)
    """

    def on_train_begin(self, run_context: RunContext) -> None:
        """Compares the two before the first step; raises BaseMismatchError as on_base_mismatch of pet_config says."""
        check_loaded_base(run_context.original_args().train_network)

    def on_eval_begin(self, run_context: RunContext) -> None:
        """Compares the two before the first batch, as on_train_begin does."""
        check_loaded_base(run_context.original_args().network)
