"""One rank of bench_exchange.py, which starts it with msrun: bytes and seconds of exchanges, or fine-tunings.

The first argument is "exchange" or "loss", the second a JSON object with the settings; rank 0 writes its result.
"""

import json
import sys
import time
from typing import Any, Dict, List

import bench_common  # noqa: F401  first: it sets what must be set before MindSpore is imported
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.training.exchange import Exchange, FlatLayout, Ranks, exchange_settings
from mindlora.training.exchange.make import make_exchange

# Seconds after which the receipts of all messages have been sent.
SETTLE = 0.6
WIDTH, BATCH, RATE = 128, 32, 1e-2


class ExchangeStep(nn.Cell):
    """An exchange and nothing else."""

    def __init__(self, exchange: Exchange):
        super().__init__(auto_prefix=False)
        self.exchange = exchange

    def construct(self, flat):
        total, residual = self.exchange.reduce(flat)
        return ops.depend(total, self.exchange.keep(residual))


class Base(nn.Cell):
    """Two frozen layers that get adapters; the mean squared error of their output."""

    def __init__(self, w1: np.ndarray, w2: np.ndarray):
        super().__init__()
        self.w1 = nn.Dense(WIDTH, WIDTH, weight_init=Tensor(w1), has_bias=False)
        self.w2 = nn.Dense(WIDTH, WIDTH, weight_init=Tensor(w2), has_bias=False)

    def construct(self, x, targets):
        difference = self.w2(ops.relu(self.w1(x))) - targets
        return (difference * difference).mean()


class TrainStep(nn.Cell):
    """A step of Adam on the mean of the ranks' gradients."""

    def __init__(self, network: nn.Cell, rates: List[float], exchange: Exchange, layout: FlatLayout, ranks: int):
        super().__init__(auto_prefix=False)
        self.optimizer = nn.Adam(network.trainable_params(), learning_rate=rates)
        self.gradients = ops.value_and_grad(network, None, self.optimizer.parameters)
        self.exchange, self.ranks = exchange, ranks
        self.flatten, self.unflatten = layout.flatten, layout.unflatten

    def construct(self, x, targets):
        loss, gradients = self.gradients(x, targets)
        total, residual = self.exchange.reduce(self.flatten(gradients) / self.ranks)
        loss = ops.depend(loss, self.optimizer(self.unflatten(total)))
        return ops.depend(loss, self.exchange.keep(residual))


def main() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=False, device_num=get_group_size())
    settings = json.loads(sys.argv[2])
    result = {"exchange": measure_exchanges, "loss": measure_losses}[sys.argv[1]](**settings)
    if get_rank() == 0:
        with open("result.json", "w", encoding="utf-8") as file:
            json.dump(result, file)


def build(setting: Dict[str, Any], layout: FlatLayout) -> Exchange:
    """Returns an exchange; "feedback": False in the setting makes the control without error feedback."""
    node = {key: value for key, value in setting.items() if key != "feedback"}
    exchange = make_exchange(exchange_settings(node), layout, Ranks(get_rank(), get_group_size()), 1)
    exchange.feedback = setting.get("feedback", True)
    return exchange


def measure_exchanges(methods: Dict[str, Dict], size: int, steps: int) -> Dict[str, Any]:
    """Returns {method: counted and sent bytes of rank 0 and of the device in a step, and the seconds of each step}."""
    flat = Tensor(np.random.default_rng(get_rank()).normal(size=size).astype(np.float32))
    found = {}
    for name, setting in methods.items():
        exchange = build(setting, FlatLayout([Parameter(Tensor(np.zeros(size, np.float32)), name="a")]))
        step, seconds = ExchangeStep(exchange), []
        step(flat).asnumpy()
        time.sleep(SETTLE)
        before = sent_bytes()
        for _ in range(steps):
            start = time.perf_counter()
            step(flat).asnumpy()
            seconds.append(time.perf_counter() - start)
        time.sleep(SETTLE)
        written, device = (np.array(sent_bytes()) - before) / steps
        found[name] = {"counted": exchange.bytes_per_step, "written": written, "device": device, "seconds": seconds}
    return found


def sent_bytes() -> List[int]:
    """Returns how many bytes this process has written, and how many the devices of its network have sent."""
    with open("/proc/self/io", encoding="utf-8") as file:
        written = next(int(line.split()[1]) for line in file if line.startswith("wchar"))
    with open("/proc/net/dev", encoding="utf-8") as file:
        return [written, sum(int(line.split()[9]) for line in file if ":" in line)]


def measure_losses(methods: Dict[str, Dict], seeds: List[int], steps: int) -> Dict[str, Any]:
    """Returns {method: [share of the held-out loss that is left, for each seed]}.

    The adapters, of rank 8, learn a change of rank 4 in both layers of a random base, from fresh rows in each step.
    """
    found: Dict[str, List[float]] = {name: [] for name in methods}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        base = [_normal(rng, WIDTH, WIDTH) / WIDTH**0.5 for _ in range(2)]
        changed = [w + _normal(rng, WIDTH, 4) @ _normal(rng, 4, WIDTH) / (2 * WIDTH**0.5) for w in base]
        start = [_normal(rng, 8, WIDTH) / WIDTH**0.5 for _ in range(2)]
        held_out = rows(rng, changed, 1024)
        for name, setting in methods.items():
            network = Base(*base)
            apply_lora(network, LoraConfig(lora_rank=8, lora_alpha=8, target_modules=["w1", "w2"]))
            freeze_base(network)
            for cell, a in zip((network.w1, network.w2), start):
                cell.mindpet_delta_lora_a.set_data(Tensor(a))
            before = float(network(*held_out).asnumpy())
            train(network, setting, changed, seed, steps)
            found[name].append(float(network(*held_out).asnumpy()) / before)
    return found


def rows(rng: np.random.Generator, weights: List[np.ndarray], count: int) -> List[Tensor]:
    """Returns inputs, and what layers with ``weights`` make of them."""
    x = _normal(rng, count, WIDTH)
    return [Tensor(x), Tensor(np.maximum(x @ weights[0].T, 0) @ weights[1].T)]


def train(network: nn.Cell, setting: Dict[str, Any], weights: List[np.ndarray], seed: int, steps: int) -> None:
    """Trains on rows of this rank's own, with a rate that falls to 0."""
    layout = FlatLayout(network.trainable_params())
    rates = [RATE * (1 - step / steps) for step in range(steps)]
    step = TrainStep(network, rates, build(setting, layout), layout, get_group_size())
    rng = np.random.default_rng((seed, get_rank()))
    for _ in range(steps):
        step(*rows(rng, weights, BATCH))


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


if __name__ == "__main__":
    main()
