"""LossCurve: what RunReport was called in a YAML before; it goes with the next version."""

import functools

from mindformers.tools.utils import get_real_rank
from mindspore.train import RunContext

from mindlora.training.callbacks.common import register
from mindlora.training.log import logger
from mindlora.training.report.run_report import RunReport


@register
class LossCurve(RunReport):
    """Records what RunReport does, unless one that writes to the same folder is there, as mindlora-run adds it.

    Args:
        directory (str): Folder to write to. Default: None, the output folder of the run.
    """

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Says what the callback is called now; begins the history, if no RunReport writes it."""
        if get_real_rank() == 0:
            _say_the_new_name()
        others = [other for other in run_context.original_args().list_callback if type(other) is RunReport]
        if all(other.directory != self.directory for other in others):
            super().on_train_epoch_begin(run_context)


@functools.lru_cache(maxsize=None)
def _say_the_new_name() -> None:
    """Warns once in a process: each adapter of a run with several has its own LossCurve."""
    logger.warning(
        '"LossCurve" is called "RunReport" now, which mindlora-run adds by itself; this name goes with the next '
        "version. The losses are in metrics.jsonl and report.html; loss_curve.json and loss_curve.png are not written "
        "any more."
    )
