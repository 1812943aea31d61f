"""ExchangeCheck: compares the adapters of data-parallel ranks while training."""

from mindspore.train import RunContext

from mindlora.training.callbacks.common import PeriodicCallback, register
from mindlora.training.exchange.ranks import check_agreement
from mindlora.training.model.network import train_step_of


@register
class ExchangeCheck(PeriodicCallback):
    """Checks every check_every steps, and at the end, that the trained parameters have the same bits on every rank.

    mindlora-run adds it to a data-parallel run, with check_every of runner_wrapper.gradient_exchange.

    Args:
        check_every (int): Steps between two checks. Default: 100.

    Raises:
        ConfigError: check_every is less than 1.
        LoraError: While training: the parameters differ; the message names the ranks and the step.
    """

    def __init__(self, check_every: int = 100):
        super().__init__("check_every", check_every)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Compares the ranks if it is due."""
        params = run_context.original_args()
        train_step = train_step_of(params.train_network)
        if train_step is None or train_step.exchange is None:
            return
        if self.is_due(params):
            check_agreement(train_step.weights, params.cur_step_num)
        self.step_before = params.cur_step_num
