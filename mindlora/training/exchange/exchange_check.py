"""ExchangeCheck: compares the adapters of data-parallel ranks while training."""

from mindformers.tools.register import MindFormerConfig
from mindspore.train import RunContext

from mindlora.run.checks.training import EXCHANGE
from mindlora.run.yaml_run import WRAPPER, YamlRun
from mindlora.training.callbacks.common import PeriodicCallback, register
from mindlora.training.exchange.exchange import check_agreement
from mindlora.training.exchange.settings import exchange_settings
from mindlora.training.model.network import train_step_of


@register
class ExchangeCheck(PeriodicCallback):
    """Checks, every check_every steps and at the end, that the trained parameters have the same bits on every rank.

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
        """Compares the ranks if a check is due."""
        params = run_context.original_args()
        train_step = train_step_of(params.train_network)
        if train_step is None or train_step.exchange is None:
            return
        if self.is_due(params):
            check_agreement(train_step.weights, params.cur_step_num)
        self.step_before = params.cur_step_num


def prepare_exchange(config: MindFormerConfig) -> None:
    """Makes data-parallel ranks compare their adapters: adds ExchangeCheck to a YAML that has passed the checks."""
    run = YamlRun(config)
    settings = exchange_settings(run.at(EXCHANGE) or "dense")
    whole = run.in_parallel and not run.split_by
    if whole and settings.check_every and run.train_step == WRAPPER:
        check = MindFormerConfig(type="ExchangeCheck", check_every=settings.check_every)
        config.callbacks = [*(config.callbacks or []), check]
