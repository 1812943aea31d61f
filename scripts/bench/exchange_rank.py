"""One rank of the benchmark exchange, started with msrun: measures exchanges, or fine-tunes."""

import json
import os
import time
from typing import Any, Dict, List, Optional

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank, init

from bench import ROOT
from mindlora import LoraConfig, apply_lora, freeze_base
from mindlora.training.exchange.exchange import Exchange, FlatLayout, Ranks, make_exchange
from mindlora.training.exchange.settings import exchange_settings

# Seconds after which all messages' receipts have been sent.
SETTLE = 0.6
TEXTS = os.path.join(ROOT, "scripts", "quickstart_data")
# A byte-level Llama; each rank trains on ROWS rows in a step.
LLAMA = {
    "seq_length": 64,
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 256,
    "intermediate_size": 256,
    "pad_token_id": 0,
    "disable_lazy_inline": True,
    "use_rope_slice": True,
    "fused_rms_norm": False,
    **dict.fromkeys(("compute_dtype", "layernorm_compute_type", "softmax_compute_type"), "float32"),
    **dict.fromkeys(("rotary_dtype", "param_init_type"), "float32"),
}
ROWS, RATE, BASE_RATE = 8, 5e-3, 2e-3


class ExchangeStep(nn.Cell):
    """A step that only exchanges gradients."""

    def __init__(self, exchange: Exchange):
        super().__init__(auto_prefix=False)
        self.exchange = exchange

    def construct(self, flat):
        total, residual = self.exchange.reduce(flat)
        return ops.depend(total, self.exchange.keep(residual))


class TrainStep(nn.Cell):
    """A step of Adam on the mean of the ranks' gradients, or on this rank's gradients without an exchange."""

    def __init__(self, network: nn.Cell, rates: List[float], exchange: Optional[Exchange], layout: FlatLayout):
        super().__init__(auto_prefix=False)
        self.optimizer = nn.Adam(network.trainable_params(), learning_rate=rates)
        self.gradients = ops.value_and_grad(network, None, self.optimizer.parameters)
        self.exchange = exchange
        self.ranks = get_group_size()
        self.flatten = layout.flatten
        self.unflatten = layout.unflatten

    def construct(self, tokens):
        loss, gradients = self.gradients(tokens)
        if self.exchange is None:
            return ops.depend(loss, self.optimizer(gradients))
        total, residual = self.exchange.reduce(self.flatten(gradients) / self.ranks)
        loss = ops.depend(loss, self.optimizer(self.unflatten(total)))
        return ops.depend(loss, self.exchange.keep(residual))


def measure(what: str, settings: Dict[str, Any]) -> None:
    """Measures "exchange" or "loss"; rank 0 writes the figures to result.json."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=False, device_num=get_group_size())
    figures = {"exchange": measure_exchanges, "loss": measure_losses}[what](**settings)
    if get_rank() == 0:
        with open("result.json", "w", encoding="utf-8") as file:
            json.dump(figures, file)


def build(setting: Dict[str, Any], layout: FlatLayout) -> Exchange:
    """Returns an exchange; "feedback": False in the setting makes the control without error feedback."""
    node = {key: value for key, value in setting.items() if key != "feedback"}
    exchange = make_exchange(exchange_settings(node), layout, Ranks(get_rank(), get_group_size()), 1)
    exchange.feedback = setting.get("feedback", True)
    return exchange


def measure_exchanges(methods: Dict[str, Dict], size: int, steps: int) -> Dict[str, Any]:
    """Returns {method: computed and actual bytes of rank 0 and the device per step, and each step's seconds}."""
    flat = Tensor(np.random.default_rng(get_rank()).normal(size=size).astype(np.float32))
    figures = {}
    for name, setting in methods.items():
        exchange = build(setting, FlatLayout([Parameter(Tensor(np.zeros(size, np.float32)), name="a")]))
        step = ExchangeStep(exchange)
        seconds = []
        step(flat).asnumpy()
        time.sleep(SETTLE)
        before = sent_bytes()
        for _ in range(steps):
            start = time.perf_counter()
            step(flat).asnumpy()
            seconds.append(time.perf_counter() - start)
        time.sleep(SETTLE)
        written, device = (np.array(sent_bytes()) - before) / steps
        figures[name] = {"counted": exchange.bytes_per_step, "written": written, "device": device, "seconds": seconds}
    return figures


def sent_bytes() -> List[int]:
    """Returns the bytes that this process has written, and the bytes that its network devices have sent."""
    with open("/proc/self/io", encoding="utf-8") as file:
        written = next(int(line.split()[1]) for line in file if line.startswith("wchar"))
    with open("/proc/net/dev", encoding="utf-8") as file:
        return [written, sum(int(line.split()[9]) for line in file if ":" in line)]


def measure_losses(methods: Dict[str, Dict], seeds: List[int], steps: int, base_steps: int) -> Dict[str, Any]:
    """Returns {method: [held-out loss of each seed]}, and the loss before training as "before".

    A Llama pretrained on a text gets adapters of rank 8 on its linear cells, which learn dialogues of another kind. The
    seeds determine A and the rows. Each method compiles one network for all seeds.
    """
    base_text, dialogues = texts()
    train_text, held_out_text = np.split(dialogues, [len(dialogues) * 9 // 10])
    held_out = Tensor(held_out_text[: len(held_out_text) // 65 * 65].reshape(-1, 65))
    base = {p.name: p.asnumpy() for p in pretrained(base_text, base_steps).get_parameters()}
    losses: Dict[str, Any] = {"before": None}
    for name, setting in methods.items():
        network = llama(base)
        apply_lora(network, LoraConfig(lora_rank=8, lora_alpha=16, target_modules="all-linear"))
        freeze_base(network)
        layout = FlatLayout(network.trainable_params())
        rates = [RATE * (1 - step / steps) for step in range(steps)]
        step = TrainStep(network, rates, build(setting, layout), layout).set_train()
        # The initial values of moments and counts; in data parallel, they have none before a compilation.
        initial = {p.name: p.init_data().asnumpy().copy() for p in step.get_parameters() if p.name not in base}
        losses["before"] = held_out_loss(network, held_out)
        losses[name] = []
        for seed in seeds:
            rng = np.random.default_rng(seed)
            for parameter in step.get_parameters():
                if parameter.name in initial:
                    values = initial[parameter.name]
                    if parameter.name in layout.names and parameter.name.endswith("lora_a"):
                        values = rng.normal(size=values.shape).astype(np.float32) / values.shape[1] ** 0.5
                    # Not set_data: a graph keeps old values of parameters that only one branch uses.
                    ops.assign(parameter, Tensor(values))
            rng = np.random.default_rng((seed, get_rank()))
            for _ in range(steps):
                step(rows(rng, train_text))
            losses[name].append(held_out_loss(network, held_out))
    return losses


def texts() -> List[np.ndarray]:
    """Returns the bytes of two bundled texts: the base's training text, and the dialogues for the adapters."""
    with open(os.path.join(TEXTS, "base.txt"), "rb") as file:
        base = file.read()
    with open(os.path.join(TEXTS, "dialogues.json"), encoding="utf-8") as file:
        dialogues = "\n".join(f"{row['instruction']}\n{row['output']}" for row in json.load(file)).encode()
    return [np.frombuffer(text, np.uint8).astype(np.int32) for text in (base, dialogues)]


def llama(values: Optional[Dict[str, np.ndarray]] = None) -> nn.Cell:
    """Returns the network in training mode, with the given weights."""
    from mindformers.models.llama import LlamaConfig, LlamaForCausalLM

    ms.set_seed(1)
    network = LlamaForCausalLM(config=LlamaConfig(**LLAMA))
    for parameter in network.get_parameters():
        if values is not None:
            parameter.set_data(Tensor(values[parameter.name]))
    return network.set_train()


def pretrained(text: np.ndarray, steps: int) -> nn.Cell:
    """Returns a network trained on the text; each rank trains the same network by itself."""
    network = llama()
    layout = FlatLayout(network.trainable_params())
    step = TrainStep(network, [BASE_RATE * (1 - i / steps) for i in range(steps)], None, layout).set_train()
    rng = np.random.default_rng(0)
    for _ in range(steps):
        step(rows(rng, text))
    return network


def rows(rng: np.random.Generator, text: np.ndarray) -> Tensor:
    """Returns rows of seq_length + 1 bytes from random places in a text."""
    starts = rng.integers(0, len(text) - 65, ROWS)
    return Tensor(text[starts[:, None] + np.arange(65)])


def held_out_loss(network: nn.Cell, tokens: Tensor) -> float:
    """Returns the mean loss per byte."""
    return float(np.mean([float(network(part).asnumpy()) for part in tokens.split(8) if len(part) == 8]))
