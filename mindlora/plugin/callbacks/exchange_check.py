"""ExchangeCheck: compares the adapters of data-parallel ranks while training."""

from mindspore import Callback
from mindspore.train import RunContext

from mindlora.common.fields import COUNT, check_number
from mindlora.plugin.callbacks.common import register
from mindlora.plugin.graph.network import train_step_of
from mindlora.plugin.resume.training_state import passed, total_steps
from mindlora.training.exchange.agreement import check_agreement


@register
class ExchangeCheck(Callback):
    """Checks every check_every steps, and at the end, that the trained parameters have the same bits on every rank.

    mindlora-run adds it to a data-parallel run, with check_every of runner_wrapper.gradient_exchange.

    Args:
        check_every (int): Steps between two checks. Default: 100.

    Raises:
        ConfigError: check_every is less than 1.
        LoraError: While training: the parameters differ; the message names the ranks and the step.
    """

    def __init__(self, check_every: int = 100):
        super().__init__()
        check_number(check_every, "check_every", COUNT)
        self.check_every, self.checked = check_every, 0

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Records the last step before the epoch."""
        # Not when training begins: a resumed run may not know its step by then.
        self.checked = run_context.original_args().cur_step_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Compares the ranks if it is due."""
        params = run_context.original_args()
        step = params.cur_step_num
        train_step = train_step_of(params.train_network)
        if train_step is None or train_step.exchange is None:
            return
        if passed(self.check_every, self.checked, step) or step == total_steps(params):
            check_agreement(train_step.weights, step)
            self.checked = step
