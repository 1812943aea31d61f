"""Benchmark: the memory and time that dropout on the low-rank path costs, here and in MindFormers' own LoRA.

A forward and backward through a stack of linear layers with LoRA, in graph mode and float32 on a CPU, each side in
processes of its own. Memory of activations: the largest resident memory of a process that runs all tokens, less that of
one that runs a single token through the same network, so that weights, compiler and libraries cancel out. The time is
the median of the steps after the first, in the process that ran all tokens.
    python scripts/bench_dropout.py --json figures.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Dict

import bench_common  # first: it sets what must be set before MindSpore is imported

SIDES = {
    "mindlora, no dropout": ("mindlora", 0.0),
    "mindlora, dropout 0.05": ("mindlora", 0.05),
    "MindFormers, no dropout": ("mindformers", 0.0),
    "MindFormers, dropout 0.05": ("mindformers", 0.05),
}


def main() -> None:
    parser = bench_common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind; the sides take turns")
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "TOKENS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(run(args, args.child[0], int(args.child[1]))))
        return
    found = {side: {"MiB": [], "ms": []} for side in SIDES}
    for _ in range(args.rounds):
        for side, figures in found.items():
            whole, single = child(side, args.tokens), child(side, 1)
            figures["MiB"].append(whole["MiB"] - single["MiB"])
            figures["ms"].append(whole["ms"])
    result = {
        side: {unit: statistics.median(values) for unit, values in figures.items()} for side, figures in found.items()
    }
    machine = bench_common.machine("mindspore", "mindformers")
    print(
        f"{bench_common.machine_line(machine)}\n{args.layers} layers {args.width} x {args.width}, rank {args.rank}, "
        f"{args.tokens} tokens; median of {args.rounds} processes\n"
    )
    print(f"{'':<26}  {'activations':>12}  {'of no dropout':>13}  {'step':>8}  {'of no dropout':>13}")
    for side, figures in result.items():
        base = result[f"{side.partition(',')[0]}, no dropout"]
        print(
            f"{side:<26}  {figures['MiB']:8.0f} MiB  {figures['MiB'] / base['MiB']:12.2f}x  {figures['ms']:5.0f} ms"
            f"  {figures['ms'] / base['ms']:12.2f}x"
        )
    print("Goal: activations with dropout at most 1.05x of those without.")
    figures = {"machine": machine, "arguments": vars(args), "sides": result, "all": found}
    bench_common.write_json(args.json, figures)


def child(side: str, tokens: int) -> Dict[str, float]:
    """Returns the figures of one side, run in a process of its own."""
    output = subprocess.run(
        [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--child", side, str(tokens)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    return json.loads(output.splitlines()[-1])


def run(args: argparse.Namespace, side: str, tokens: int) -> Dict[str, float]:
    """Returns the largest resident memory in MiB and the median time of a step in ms."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    layer, rate = SIDES[side][0], SIDES[side][1]
    network = nn.SequentialCell(*[LAYERS[layer](args.width, args.rank, rate) for _ in range(args.layers)])
    for parameter in network.get_parameters():
        parameter.requires_grad = "lora" in parameter.name
        parameter.set_data(Tensor(np.full(parameter.shape, 1e-3, np.float32)))
    network.set_train()

    def total(x):
        return network(x).sum()

    step = ms.value_and_grad(total, None, network.trainable_params())
    x, times = Tensor(np.ones((tokens, args.width), np.float32)), []
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

if __name__ == "__main__":
    main()
