"""Memory and time that dropout on the low-rank path costs, here and in MindFormers' own LoRA.

A forward and backward through a stack of linear layers with LoRA, in graph mode and float32 on a CPU, each side in
processes of its own. Memory of activations: the largest resident memory of a process that runs all tokens, less that of
one that runs a single token through the same network, so that weights, compiler and libraries cancel out. The time is
the median of the steps after the first, in the process that ran all tokens.
"""

import argparse
import json
import statistics
import subprocess
import time
from typing import Any, Dict, List

from bench.common import add_number, child_command

SIDES = {
    "mindlora, no dropout": ("mindlora", 0.0),
    "mindlora, dropout 0.05": ("mindlora", 0.05),
    "MindFormers, no dropout": ("mindformers", 0.0),
    "MindFormers, dropout 0.05": ("mindformers", 0.05),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--layers", 16, 2, "linear layers")
    add_number(parser, "--tokens", 2048, 64, "rows of the input")
    add_number(parser, "--width", 1024, 64, "of each layer")
    parser.add_argument("--rank", type=int, default=16)
    add_number(parser, "--rounds", 3, 1, "processes of each kind; the sides take turns")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the table and returns the figures."""
    samples: Dict[str, Dict[str, List[float]]] = {side: {"MiB": [], "ms": []} for side in SIDES}
    for _ in range(args.rounds):
        for side, figures in samples.items():
            whole = in_a_process(args, side, args.tokens)
            single = in_a_process(args, side, 1)
            figures["MiB"].append(whole["MiB"] - single["MiB"])
            figures["ms"].append(whole["ms"])
    medians = {}
    for side, figures in samples.items():
        medians[side] = {unit: statistics.median(values) for unit, values in figures.items()}
    print(table(args, medians))
    return {"sides": medians, "all": samples}


def table(args: argparse.Namespace, medians: Dict[str, Dict[str, float]]) -> str:
    """Returns the figures as text."""
    lines = [
        f"{args.layers} layers {args.width} x {args.width}, rank {args.rank}, {args.tokens} tokens; median of "
        f"{args.rounds} processes\n",
        f"{'':<26}  {'activations':>12}  {'of no dropout':>13}  {'step':>8}  {'of no dropout':>13}",
    ]
    for side, figures in medians.items():
        base = medians[f"{side.partition(',')[0]}, no dropout"]
        lines.append(
            f"{side:<26}  {figures['MiB']:8.0f} MiB  {figures['MiB'] / base['MiB']:12.2f}x  {figures['ms']:5.0f} ms"
            f"  {figures['ms'] / base['ms']:12.2f}x"
        )
    return "\n".join([*lines, "Goal: activations with dropout at most 1.05x of those without."])


def in_a_process(args: argparse.Namespace, side: str, tokens: int) -> Dict[str, float]:
    """Returns the figures of one side, run in a process of its own."""
    sizes = ["--layers", str(args.layers), "--width", str(args.width), "--rank", str(args.rank)]
    command = child_command("dropout", *sizes, "--child", side, str(tokens))
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def child(args: argparse.Namespace, words: List[str]) -> None:
    """Prints the figures of the side and the number of tokens that ``words`` names."""
    side, tokens = words
    print(json.dumps(measure(args, side, int(tokens))))


def measure(args: argparse.Namespace, side: str, tokens: int) -> Dict[str, float]:
    """Returns the largest resident memory in MiB and the median time of a step in ms."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    layer, rate = SIDES[side]
    network = nn.SequentialCell(*[LAYERS[layer](args.width, args.rank, rate) for _ in range(args.layers)])
    for parameter in network.get_parameters():
        parameter.requires_grad = "lora" in parameter.name
        parameter.set_data(Tensor(np.full(parameter.shape, 1e-3, np.float32)))
    network.set_train()

    def total(x):
        return network(x).sum()

    step = ms.value_and_grad(total, None, network.trainable_params())
    x = Tensor(np.ones((tokens, args.width), np.float32))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        float(step(x)[0])
        times.append(1000 * (time.perf_counter() - start))
    with open("/proc/self/status", encoding="utf-8") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    return {"MiB": peak / 1024, "ms": statistics.median(times[1:])}


def our_layer(width: int, rank: int, rate: float) -> Any:
    """A linear layer with mindlora's LoRA."""
    from mindlora import LoRADense

    return LoRADense(width, width, rank, 2 * rank, rate, has_bias=False)


def their_layer(width: int, rank: int, rate: float) -> Any:
    """A linear layer with MindFormers' own LoRA."""
    import mindspore as ms
    from mindpet.delta.lora import LoRADense

    return LoRADense(width, width, rank, 2 * rank, rate, has_bias=False, compute_dtype=ms.float32)


LAYERS = {"mindlora": our_layer, "mindformers": their_layer}
