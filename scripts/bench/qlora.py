"""A frozen layer in few bits against the same layer in float32 on a CPU: time and resident memory.

The formats are 4-bit NormalFloat, 4-bit integers in groups of 128 columns, and 8-bit integers by rows; bfloat16 is
measured too.

Each number of threads, and each side of the memory measurement, gets its own process on that many cores, since
OMP_NUM_THREADS takes effect only before the libraries load. The sides take turns as in the benchmark ops, with its
tables: a ratio is the median of the ratios within a round, and measuring the base twice shows how accurate a ratio is.
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
from typing import Any, Callable, Dict, Iterator, List, Tuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from bench.common import AGAIN, BASE, add_number, child_command, compare, load_average, text, wait
from bench.ops import Base, Layers, Step, frozen, normal, on_path
from mindlora.core.numerics.integers import pack
from mindlora.ops import Nf4Linear, backend, quantize
from mindlora.ops.frozen_linear import FrozenLinear
from mindlora.ops.integer_linear import IntegerLinear

# The instruction sets, by mindlora_set_isa's numbers.
ISAS = {"AVX2": 1, "AVX-512": 2} if platform.machine() == "x86_64" else {"of the compiler": 0}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--rounds", 40, 5, "measured rounds of each table")
    parser.add_argument("--only", choices=[*PARTS, "memory"], help="one part only")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="default: 1 2")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns their figures."""
    figures: Dict[str, Any] = {"rounds": args.rounds, "threads": {}}
    if args.only != "memory":
        for threads in args.threads:
            print(f"{threads} thread{'s' * (threads > 1)}\n")
            figures["threads"][threads] = in_a_process("tables", args, threads)
    if args.only in (None, "memory"):
        memory = {side: in_a_process(side, args, 1)[0] for side in MEMORY}
        dense = memory["float32"]["bytes"]
        figures["memory"] = {**memory, "ratio": memory["NF4"]["bytes"] / dense}
        for side, measured in memory.items():
            size = measured["bytes"]
            goal = " (goal: 0.14)" if side == "NF4" else ""
            print(f"resident memory of the base, {side}: {size / 2**20:.1f} MiB, ratio {size / dense:.4f}{goal}")
    return figures


def in_a_process(what: str, args: argparse.Namespace, threads: int) -> List[Dict[str, Any]]:
    """Measures one number of threads, or one side's memory; prints the tables and returns the figures."""
    options = ["--rounds", str(args.rounds)]
    if args.quick:
        options.append("--quick")
    if args.only:
        options += ["--only", args.only]
    command = child_command("qlora", *options, "--child", what)
    figures = []
    cores = sorted(os.sched_getaffinity(0))[:threads]
    # With only OMP_NUM_THREADS, MindSpore's MatMul still has a second thread.
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


def child(args: argparse.Namespace, words: List[str]) -> None:
    """Prints a line of JSON for each table, or for the memory of the side that ``words`` names."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    (what,) = words
    if what != "tables":
        print(json.dumps(memory_of(what, args.quick)), flush=True)
        return
    for part, tables in PARTS.items():
        if args.only in (None, part):
            for figures in tables(args.quick, args.rounds):
                print(json.dumps({**figures, "load_average": load_average()}), flush=True)


def decode(quick: bool, rounds: int) -> Iterator[Dict[str, Any]]:
    """Yields a table for each width and number of tokens of a decode step."""
    # Enough layers that the packed weights do not stay in a 32 MB cache between passes.
    for width, layers in ((256, 4),) if quick else ((2048, 24), (4096, 6)):
        for tokens in (1, 4, 8):
            sides = {BASE: Layers(Base, width, layers), AGAIN: Layers(Base, width, layers)}
            packed = {name: Layers(kind, width, layers) for name, kind in PACKED.items()}
            for isa_name, isa in ISAS.items():
                if library().mindlora_set_isa(isa) == isa:
                    sides.update({f"{name} ({isa_name})": with_isa(network, isa) for name, network in packed.items()})
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
            **{f"{name} (cpu)": Layers(kind, width, layers) for name, kind in PACKED.items() if kind is not Nf4},
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


def memory_of(side: str, quick: bool) -> Dict[str, Any]:
    """Returns the growth of this process's resident memory from layers that have run once."""
    width, layers = (256, 4) if quick else (4096, 12)
    x = normal(1, width)
    # Any first network costs memory. This one is small, because memory that it frees is reused for the weights.
    wait(Layers(Base, 64, 1)(normal(1, 64)))
    before = resident()
    network = Layers(MEMORY[side], width, layers)
    wait(network(x))
    return {"side": side, "bytes": resident() - before, "layers": layers, "width": width}


def resident() -> int:
    """Returns this process's resident memory in bytes, without freed memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Nf4(nn.Cell):
    """y = x W^T, frozen, for the same W as Base."""

    def __init__(self, width, index, path="cpu"):
        super().__init__()
        self.set_weight(packed_weight(width, index))
        self.linear = on_path(Nf4Linear, path)

    def set_weight(self, arrays):
        for name, array in arrays.items():
            setattr(self, name, Parameter(Tensor(array), name=name, requires_grad=False))

    def construct(self, x: Tensor) -> Tensor:
        return self.linear(x, self.codes, self.absmax, self.scales, self.offsets)


class RandomNf4(Nf4):
    """Nf4 with random codes, so that the process never holds a float32 weight."""

    def __init__(self, width, index):
        nn.Cell.__init__(self)
        rng = np.random.default_rng(index)
        blocks = width // 64
        arrays = {
            "codes": rng.integers(0, 256, (width, width // 2), np.uint8),
            "absmax": rng.integers(0, 256, (width, blocks), np.uint8),
            "scales": np.full(width * blocks // 256, 1e-4, np.float32),
            "offsets": np.full(width * blocks // 256, 1e-2, np.float32),
        }
        self.set_weight(arrays)
        self.linear = on_path(Nf4Linear, "cpu")


class RandomDense(Base):
    """Base with its own weight, which no cache holds."""

    def __init__(self, width, index):
        super().__init__(width, index)
        frozen.cache_clear()


class Integers(nn.Cell):
    """y = x W^T, frozen, for a W near Base's, in integers."""

    def __init__(self, width, index, bits, random=False):
        super().__init__()
        groups = width // 128 if bits == 4 else 1
        if random:
            rng = np.random.default_rng(index)
            codes = rng.integers(0, 256, (width, width * bits // 8), np.uint8)
            scales = np.full((width, groups), 0.01, np.float16)
        else:
            codes, scales = integers(width, index, bits, groups)
        zeros = np.full((width, groups), 8 if bits == 4 else 0, np.uint8)
        for name, array in (("codes", codes), ("zeros", zeros), ("scales", scales)):
            setattr(self, name, Parameter(Tensor(array), name=name, requires_grad=False))
        self.linear = IntegerLinear(bits)

    def construct(self, x: Tensor) -> Tensor:
        return self.linear(x, self.codes, self.zeros, self.scales)


class Bfloat16(nn.Cell):
    """y = x W^T, frozen, for Base's W in bfloat16, by frozen_linear."""

    def __init__(self, width, index):
        super().__init__()
        self.weight = Parameter(frozen(width, index).astype(ms.bfloat16), name="weight", requires_grad=False)
        self.linear = FrozenLinear()

    def construct(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight)


PACKED = {
    "nf4_linear": Nf4,
    "integer_linear, 4 bits": functools.partial(Integers, bits=4),
    "integer_linear, 8 bits": functools.partial(Integers, bits=8),
    "frozen_linear, bfloat16": Bfloat16,
}
MEMORY = {
    "float32": RandomDense,
    "NF4": RandomNf4,
    "integers of 4 bits": functools.partial(Integers, bits=4, random=True),
    "integers of 8 bits": functools.partial(Integers, bits=8, random=True),
}


@functools.lru_cache(maxsize=None)
def integers(width: int, index: int, bits: int, groups: int) -> Tuple[np.ndarray, np.ndarray]:
    """Returns the code bytes and the scales of frozen(width, index) rounded to integers."""
    weight = frozen(width, index).asnumpy().reshape(width, groups, -1)
    scales = (np.abs(weight).max(axis=2) / (2 ** (bits - 1) - 1)).astype(np.float16)
    codes = np.rint(weight / scales[:, :, None].astype(np.float32)).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    codes = codes.reshape(width, width).astype(np.int8)
    return pack((codes + 8).astype(np.uint8) if bits == 4 else codes, bits), scales


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
