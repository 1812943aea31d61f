"""AdamW by one kernel on a CPU: the values of MindFormers' own, whatever the groups."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from tests.conftest import in_mode

STEPS = 5


class Weights(nn.Cell):
    """Two parameters."""

    def __init__(self, dtype=np.float32):
        super().__init__()
        rng = np.random.default_rng(0)
        self.first = Parameter(Tensor(rng.standard_normal((3, 4)).astype(dtype)), name="first")
        self.second = Parameter(Tensor(rng.standard_normal(5).astype(dtype)), name="second")


def grouped(weights, **keys):
    """Each parameter as a group, the second one with ``keys``."""
    return [{"params": [weights.first]}, {"params": [weights.second], **keys}]


SCHEDULE = nn.ExponentialDecayLR(0.1, 0.5, 3)
CASES = {
    "one rate": (lambda weights: weights.trainable_params(), 0.1),
    "a schedule": (lambda weights: weights.trainable_params(), SCHEDULE),
    "a weight decay of its own": (lambda weights: grouped(weights, weight_decay=0.5), SCHEDULE),
    "a rate of its own": (lambda weights: grouped(weights, lr=0.01), 0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_each_step_is_that_of_mindformers(name, mindformers, graph_mode):
    """Ours in graph mode, theirs in PyNative."""
    from mindformers.core.optim.adamw import AdamW

    from mindlora.training.step.cpu_adamw import CpuAdamW, use_cpu_adamw

    groups, rate = CASES[name]
    trained = []
    for replaces in (False, True):
        weights = Weights()
        optimizer = AdamW(groups(weights), rate, betas=(0.8, 0.9), eps=1e-2, weight_decay=0.1)
        if replaces:
            use_cpu_adamw(optimizer)
            assert type(optimizer) is CpuAdamW
        rng = np.random.default_rng(1)
        with in_mode(int(not replaces)):
            for _ in range(STEPS):
                optimizer(tuple(Tensor(rng.standard_normal(p.shape).astype(np.float32)) for p in optimizer.parameters))
        trained.append([p.asnumpy() for p in (*optimizer.parameters, *optimizer.exp_avg, *optimizer.exp_avg_sq)])
    for theirs, ours in zip(*trained):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=1e-7)


def test_others_are_left_as_they_are(mindformers, graph_mode):
    from mindformers.core.optim.adamw import AdamW

    from mindlora.training.step.cpu_adamw import use_cpu_adamw

    for optimizer in (AdamW(Weights(np.float16).trainable_params()), nn.Adam(Weights().trainable_params())):
        kind = type(optimizer)
        use_cpu_adamw(optimizer)
        assert type(optimizer) is kind
