"""Benchmark: a frozen layer in 4-bit NormalFloat against the same layer in float32, on a CPU in graph mode.

Each number of threads and each side of the memory gets a process of its own on as many cores, since OMP_NUM_THREADS
takes effect only before the libraries load. In it the sides take turns as in bench_ops.py, with the same tables: a
ratio is the median of the ratios within a round, and measuring the base twice shows how far a ratio can be trusted.
    python scripts/bench_qlora.py --json figures.json
    python scripts/bench_qlora.py --quick
"""

import argparse
import ctypes
import functools
import gc
import json
import os
import platform
import subprocess
import sys
from typing import Any, Callable, Dict, Iterator, List

import bench_common  # first: it sets what must be set before MindSpore is imported
import mindspore as ms
import numpy as np
from bench_common import AGAIN, BASE, compare, machine, machine_line, text, wait
from bench_ops import Base, Layers, Step, frozen, normal, on_path
from mindspore import Parameter, Tensor, nn

from mindlora.ops import Nf4Linear, backend, quantize

# The instruction sets of mindlora_set_isa.
ISAS = {"AVX2": 1, "AVX-512": 2} if platform.machine() == "x86_64" else {"of the compiler": 0}


def main() -> None:
    parser = bench_common.parser(__doc__)
    parser.add_argument("--rounds", type=int, help="measured rounds of each table (default: 40, with --quick 5)")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds, to check that it runs")
    parser.add_argument("--only", choices=[*PARTS, "memory"], help="one part only")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: 1 2")
    parser.add_argument("--child", metavar="WHAT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (5 if args.quick else 40)
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    if args.child:
        measure(args)
        return
    found = {"machine": machine("mindspore"), "rounds": args.rounds, "threads": {}}
    print(machine_line(found["machine"]))
    if args.only != "memory":
        for threads in args.threads:
            print(f"\n{threads} thread{'s' * (threads > 1)}\n")
            found["threads"][threads] = child("tables", args, threads)
    if args.only in (None, "memory"):
        found["memory"] = {side: child(side, args, 1)[0] for side in ("float32", "NF4")}
        dense, packed = (found["memory"][side]["bytes"] for side in ("float32", "NF4"))
        found["memory"]["ratio"] = packed / dense
        print(
            f"\nresident memory of the base: float32 {dense / 2**20:.1f} MiB, NF4 {packed / 2**20:.1f} MiB, "
            f"ratio {packed / dense:.4f} (goal: 0.14)"
        )
    bench_common.write_json(args.json, found)


def child(what: str, args: argparse.Namespace, threads: int) -> List[Dict[str, Any]]:
    """Runs this script for one number of threads or one side, prints its tables and returns its figures."""
    command = [sys.executable, os.path.abspath(__file__), "--child", what, "--rounds", str(args.rounds)]
    command += ["--quick"] * args.quick + (["--only", args.only] if args.only else [])
    figures, cores = [], sorted(os.sched_getaffinity(0))[:threads]
    # With OMP_NUM_THREADS alone MindSpore's MatMul still has a second thread.
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ) as process:
        for line in process.stdout:
            figures.append(json.loads(line))
            if "title" in figures[-1]:
                print(f"{text(figures[-1])}\n(load {figures[-1]['load_average']})\n", flush=True)
    if process.returncode:
        sys.exit(f"error: {' '.join(command)} failed")
    return figures


def measure(args: argparse.Namespace) -> None:
    """Does the work of a child: prints one line of JSON for each table or side."""
    if args.child != "tables":
        print(json.dumps(memory(args.child, args.quick)), flush=True)
        return
    for part, tables in PARTS.items():
        if args.only in (None, part):
            for figures in tables(args.quick, args.rounds):
                print(json.dumps({**figures, "load_average": machine()["load_average"]}), flush=True)


def decode(quick: bool, rounds: int) -> Iterator[Dict[str, Any]]:
    """Yields a table for each width and number of tokens of a decode step."""
    # So many layers that the packed weights do not remain in a cache of 32 MB between passes.
    for width, layers in ((256, 4),) if quick else ((2048, 24), (4096, 6)):
        for tokens in (1, 4, 8):
            sides = {BASE: Layers(Base, width, layers), AGAIN: Layers(Base, width, layers)}
            packed = Layers(Nf4, width, layers)
            sides.update(
                {
                    f"nf4_linear ({name})": with_isa(packed, isa)
                    for name, isa in ISAS.items()
                    if library().mindlora_set_isa(isa) == isa
                }
            )
            goal = "goal of one token: AVX-512 0.333, AVX2 0.769" if width == 4096 and tokens == 1 else "no goal"
            yield compare(
                f"forward, {layers} layers {width} x {width}, {tokens} token{'s' * (tokens > 1)}; base: float32",
                sides,
                (normal(tokens, width),),
                rounds,
                goal,
            )


def training(quick: bool, rounds: int) -> Iterator[Dict[str, Any]]:
    """Yields a table for each width: forward and backward over frozen layers, with the gradient of x."""
    library().mindlora_set_isa(-1)
    tokens = 64 if quick else 512
    for width, layers in ((256, 2),) if quick else ((2048, 2), (4096, 1)):
        sides = {
            BASE: Layers(Base, width, layers),
            AGAIN: Layers(Base, width, layers),
            "nf4_linear (cpu)": Layers(Nf4, width, layers),
        }
        if width <= 2048:
            sides["nf4_linear (composed)"] = Layers(functools.partial(Nf4, path="composed"), width, layers)
        steps = {side: Step(network) for side, network in sides.items()}
        yield compare(
            f"forward and backward, {layers} frozen layers {width} x {width}, {tokens} tokens; base: float32",
            steps,
            (normal(tokens, width),),
            max(5, rounds // 2),
            "goal: 1.05",
        )


PARTS = {"decode": decode, "training": training}


def memory(side: str, quick: bool) -> Dict[str, Any]:
    """Returns by how much the resident memory of this process grows by layers that have run once."""
    width, layers = (256, 4) if quick else (4096, 12)
    x = normal(1, width)
    # Any first network costs memory. This one is small: memory that it frees would be reused for the weights.
    wait(Layers(Base, 64, 1)(normal(1, 64)))
    before = resident()
    network = Layers({"float32": RandomDense, "NF4": RandomNf4}[side], width, layers)
    wait(network(x))
    return {"side": side, "bytes": resident() - before, "layers": layers, "width": width}


def resident() -> int:
    """Returns the resident memory of this process in bytes, without what was freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Nf4(nn.Cell):
    """y = x W^T, frozen, for the same W as Base."""

    def __init__(self, width, index, path="cpu"):
        super().__init__()
        for name, array in packed_weight(width, index).items():
            setattr(self, name, Parameter(Tensor(array), name=name, requires_grad=False))
        self.linear = on_path(Nf4Linear, path)

    def construct(self, x: Tensor) -> Tensor:
        return self.linear(x, self.codes, self.absmax, self.scales, self.offsets)


class RandomNf4(Nf4):
    """Nf4 with random codes, so that the process never holds a float32 weight."""

    def __init__(self, width, index):

        nn.Cell.__init__(self)
        rng, blocks = np.random.default_rng(index), width // 64
        for name, array in {
            "codes": rng.integers(0, 256, (width, width // 2), np.uint8),
            "absmax": rng.integers(0, 256, (width, blocks), np.uint8),
            "scales": np.full(width * blocks // 256, 1e-4, np.float32),
            "offsets": np.full(width * blocks // 256, 1e-2, np.float32),
        }.items():
            setattr(self, name, Parameter(Tensor(array), name=name, requires_grad=False))
        self.linear = on_path(Nf4Linear, "cpu")


class RandomDense(Base):
    """Base with a weight of its own, which no cache holds."""

    def __init__(self, width, index):
        super().__init__(width, index)
        frozen.cache_clear()


@functools.lru_cache(maxsize=None)
def packed_weight(width: int, index: int) -> Dict[str, np.ndarray]:
    """Returns the tensors of frozen(width, index) quantized to NF4."""
    array = quantize(frozen(width, index).asnumpy())
    return {name: getattr(array, name) for name in ("codes", "absmax", "scales", "offsets")}


def with_isa(network: nn.Cell, isa: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that runs a network with an instruction set."""

    def run(x):
        library().mindlora_set_isa(isa)
        return network(x)

    return run


def library() -> ctypes.CDLL:
    """Returns the CPU library."""
    return ctypes.CDLL(backend.LIBRARY)


if __name__ == "__main__":
    main()
