"""Benchmark: the cost of each variant of LoRA against plain LoRA, here and in PEFT.

One linear layer, forward and backward with the gradients of x and of all that trains, in float32 on a CPU. The sides
take turns step by step, and the figures are medians. PEFT runs in a process of its own, with a Python that has it:
    python scripts/bench_variants.py --peft-python PEFT_ENV/bin/python --json figures.json
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

import bench_common  # first: it sets what must be set before MindSpore is imported

# Threads as each library starts them, ours and PEFT's.
os.environ.pop("GOMP_SPINCOUNT", None)

# Variant -> a step that returns its ms.
Steps = Dict[str, Callable[[], float]]
# Variant -> its keys in LoraConfig. PEFT has no key for a frozen A (LoRA-FA).
VARIANTS = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "LoRA-FA": {"freeze_lora_a": True},
    "DoRA": {"use_dora": True},
    "VeRA": {"use_vera": True},
}
IN_PEFT = ("LoRA", "DoRA", "VeRA")
# What the arithmetic allows; where a variant adds none to LoRA's, the difference that two equal sides can have.
GOALS = {"rsLoRA": 1.02, "LoRA-FA": 1.02, "DoRA": 1.25, "VeRA": 1.02}


def main() -> None:
    parser = bench_common.parser(__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peft-python", metavar="FILE", help="also measure PEFT, with this Python")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        answer(peft_steps(args))
        return
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    sides = {"mindlora": mindlora_steps(args)}
    if args.peft_python:
        sides["PEFT"] = child_steps(args)
    for _ in range(3):
        measure(sides, {})
    found = {}
    for _ in range(args.steps):
        measure(sides, found)
    medians = {key: statistics.median(times) for key, times in found.items()}
    machine = bench_common.machine("mindspore")
    print(
        f"{bench_common.machine_line(machine)}\n{args.width} x {args.width}, rank {args.rank}, dropout "
        f"{args.dropout:g}, {args.tokens} tokens, forward and backward; "
        f"median of {args.steps}; threads {args.threads}\n"
    )
    print(f"{'':<16}  {'step':>9}  {'of LoRA':>8}  goal")
    result = {}
    for (side, variant), median in medians.items():
        ratio = median / medians[side, "LoRA"]
        goal = f"at most {GOALS[variant]}x" if side == "mindlora" and variant in GOALS else ""
        print(f"{side + ' ' + variant:<16}  {median:6.1f} ms  {ratio:7.3f}x  {goal}")
        result[f"{side} {variant}"] = {"ms": median, "of LoRA": ratio, "all ms": found[side, variant]}
    bench_common.write_json(args.json, {"machine": machine, "arguments": vars(args), "sides": result})


def measure(sides: Dict[str, Steps], found: Dict[Tuple[str, str], List[float]]) -> None:
    """Runs a step of each variant of each side in turn."""
    for side, steps in sides.items():
        for variant, step in steps.items():
            found.setdefault((side, variant), []).append(step())


def timed(step: Callable[[], Any]) -> Callable[[], float]:
    """Returns a function that runs ``step`` and returns its ms."""

    def run():
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start)

    return run


def mindlora_steps(args: argparse.Namespace) -> Steps:
    """Returns variant -> a timed step in graph mode."""
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn

    from mindlora import LoraConfig, apply_lora, freeze_base

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    rng = np.random.default_rng(0)
    x = Tensor(rng.normal(size=(args.tokens, args.width)).astype(np.float32))

    def step_of(keys):
        network = nn.SequentialCell(nn.Dense(args.width, args.width, has_bias=False))
        if "use_vera" not in keys:
            keys = {"lora_alpha": 2 * args.rank, "lora_b_init": "normal", **keys}
        apply_lora(network, LoraConfig(target_modules=".*", lora_rank=args.rank, lora_dropout=args.dropout, **keys))
        freeze_base(network)
        network.set_train()
        step = ms.value_and_grad(sum_of_squares(network), 0, network.trainable_params())
        return timed(lambda: float(step(x)[0]))

    return {variant: step_of(keys) for variant, keys in VARIANTS.items()}


def sum_of_squares(network: Any) -> Callable:
    """Returns a function that returns the sum of the network's squared outputs, so that no gradient is constant."""

    def total(x):
        y = network(x)
        return (y * y).sum()

    return total


def peft_steps(args: argparse.Namespace) -> Steps:
    """Returns variant -> a timed step of PEFT's layer."""
    import torch
    from peft import LoraConfig, VeraConfig, get_peft_model

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.width, requires_grad=True)

    def step_of(variant):
        config = (
            VeraConfig(vera_dropout=args.dropout)
            if variant == "VeRA"
            else LoraConfig(lora_alpha=2 * args.rank, lora_dropout=args.dropout, use_dora=variant == "DoRA")
        )
        config.target_modules, config.r = {"0"}, args.rank
        model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(args.width, args.width, bias=False)), config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.01)
        model.train()

        def step():
            model.zero_grad()
            x.grad = None
            model(x).square().sum().backward()

        return timed(step)

    return {variant: step_of(variant) for variant in IN_PEFT}


def child_steps(args: argparse.Namespace) -> Steps:
    """Returns variant -> a function that asks PEFT's process for a timed step."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # It ends when its stdin does.
    process = subprocess.Popen(
        [args.peft_python, os.path.abspath(__file__), *sys.argv[1:], "--child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )

    def ask(variant):
        process.stdin.write(variant + "\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    return {variant: lambda variant=variant: ask(variant) for variant in IN_PEFT}


def answer(steps: Steps) -> None:
    """Runs the variant that each line of stdin names, and prints its ms."""
    for line in sys.stdin:
        print(steps[line.strip()](), flush=True)


if __name__ == "__main__":
    main()
