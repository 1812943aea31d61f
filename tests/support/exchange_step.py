"""A train step with nothing in it but an exchange of gradients."""

from mindspore import nn, ops


class Step(nn.Cell):
    """Sums ``flat`` over the ranks, and keeps the residual unless the step is skipped."""

    def __init__(self, exchange):
        super().__init__(auto_prefix=False)
        self.exchange = exchange

    def construct(self, flat, skipped):
        total, residual = self.exchange.reduce(flat)
        if skipped == 0:
            total = ops.depend(total, self.exchange.keep(residual))
        return total, residual
