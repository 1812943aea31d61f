"""Time of each variant of LoRA against plain LoRA, forward and backward, here and in PEFT.

One linear layer, forward and backward with the gradients of x and of all that trains, in float32 on a CPU. The sides
take turns step by step, and the figures are medians. PEFT runs in a process of its own, with a Python that has it:
    python scripts/bench.py variants --peft-python PEFT_ENV/bin/python --json figures.json
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List

from bench.common import add_number, child_command, take_turns

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
    "MiSS": {"use_miss": True},
}
IN_PEFT = ("LoRA", "DoRA", "VeRA", "MiSS")
# Those without lora_alpha and without a B of their own.
WITHOUT_PAIR = ("use_vera", "use_miss")
# What the arithmetic allows; where a variant adds none to LoRA's, the difference that two equal sides can have.
GOALS = {"rsLoRA": 1.02, "LoRA-FA": 1.02, "DoRA": 1.25, "VeRA": 1.02, "MiSS": 1.02}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--width", 2048, 256, "of the layer")
    add_number(parser, "--tokens", 512, 64, "rows of the input")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.0)
    add_number(parser, "--steps", 31, 5, "measured steps of each variant")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peft-python", metavar="FILE", help="also measure PEFT, with this Python")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the table and returns the figures."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    sides = {("mindlora", variant): step for variant, step in mindlora_steps(args).items()}
    if args.peft_python:
        sides.update({("PEFT", variant): step for variant, step in peft_process(args).items()})
    times = take_turns(sides, args.steps, warm_up=3)
    medians = {side: statistics.median(milliseconds) for side, milliseconds in times.items()}
    print(
        f"{args.width} x {args.width}, rank {args.rank}, dropout {args.dropout:g}, {args.tokens} tokens, forward and "
        f"backward; median of {args.steps}; threads {args.threads}\n\n{'':<16}  {'step':>9}  {'of LoRA':>8}  goal"
    )
    figures = {}
    for (library, variant), median in medians.items():
        ratio = median / medians[library, "LoRA"]
        goal = f"at most {GOALS[variant]}x" if library == "mindlora" and variant in GOALS else ""
        print(f"{library + ' ' + variant:<16}  {median:6.1f} ms  {ratio:7.3f}x  {goal}")
        figures[f"{library} {variant}"] = {"ms": median, "of LoRA": ratio, "all ms": times[library, variant]}
    return {"sides": figures}


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
        if not any(field in keys for field in WITHOUT_PAIR):
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
    from peft import LoraConfig, MissConfig, VeraConfig, get_peft_model

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.tokens, args.width, requires_grad=True)

    def step_of(variant):
        if variant == "VeRA":
            config = VeraConfig(vera_dropout=args.dropout)
        elif variant == "MiSS":
            config = MissConfig(miss_dropout=args.dropout)
        else:
            config = LoraConfig(lora_alpha=2 * args.rank, lora_dropout=args.dropout, use_dora=variant == "DoRA")
        config.target_modules = {"0"}
        config.r = args.rank
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


def peft_process(args: argparse.Namespace) -> Steps:
    """Returns variant -> a function that asks PEFT's process for a timed step."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    sizes = []
    for name in ("width", "tokens", "rank", "dropout", "threads"):
        sizes += [f"--{name}", str(getattr(args, name))]
    # It ends when its stdin does.
    process = subprocess.Popen(
        child_command("variants", *sizes, "--child", python=args.peft_python),
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


def child(args: argparse.Namespace, words: List[str]) -> None:
    """Runs, with PEFT, the variant that each line of stdin names, and prints its ms."""
    steps = peft_steps(args)
    for line in sys.stdin:
        print(steps[line.strip()](), flush=True)
