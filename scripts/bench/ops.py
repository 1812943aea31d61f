"""Operators of mindlora.ops and LoRADense in graph mode, against only the frozen layer.

Float32 on a CPU, float16 on an NPU.

The sides of a table take turns in one process, in every order, on the same data. Each figure is the median over the
rounds; each ratio is the median of the ratios within a round, since other load disturbs both sides of a round alike.
The tables have wall-clock time and CPU time, which is disturbed less. Every table measures its base twice: no ratio is
more accurate than the difference of these two's ratio from 1.
    python scripts/bench.py ops --device Ascend --json figures.json
On a processor with AVX-512, ONEDNN_MAX_CPU_ISA=AVX2 restricts both sides to AVX2.
"""

import argparse
import functools
import os
from typing import Any, Callable, Dict, Iterator

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from bench.common import AGAIN, BASE, add_number, compare, limit_operators, text
from mindlora import LoraConfig, LoRADense
from mindlora.network.cells.stacked import StackedLoRADense
from mindlora.ops import LoraDelta, LoraLinear, MultiLoraDelta, MultiLoraSlotWrite, backend_report

RANK = 16
# The path of the kernels and the dtype, by device.
DEVICES = {"CPU": ("cpu", ms.float32), "Ascend": ("ascend", ms.float16)}
CELL = "LoRADense"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--rounds", 40, 5, "measured rounds of each table")
    parser.add_argument("--only", choices=["forward", "training", "many"], help="one part only")
    parser.add_argument("--device", choices=list(DEVICES), default="CPU", help="default: CPU")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns their figures."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target=args.device)
    limit_operators()
    print(f"{backend_report()}\n")
    tables = []
    for part, measure in (("forward", forward), ("training", training), ("many", many)):
        if args.only in (None, part):
            for figures in measure(args.quick, args.rounds):
                tables.append(figures)
                print(f"{text(figures)}\n", flush=True)
    return {"rounds": args.rounds, "tables": tables}


def forward(quick: bool, rounds: int) -> Iterator[Dict[str, Any]]:
    """Yields a table for each width and number of tokens: layers with LoRA against the same layers without."""
    for width, layers in ((256, 4),) if quick else ((2048, 4), (4096, 2)):
        for tokens in (1, 4, 8, 16, 32, 64, 512):
            sides = {
                BASE: Layers(Base, width, layers),
                AGAIN: Layers(Base, width, layers),
                "composed": Layers(functools.partial(WithDelta, "composed"), width, layers),
                f"lora_delta ({kernels()})": Layers(functools.partial(WithDelta, kernels()), width, layers),
                CELL: Layers(adapted_cell, width, layers),
            }
            if tokens <= 64:
                # The same GEMV with almost no delta, to separate the gain of fusion from the gain of a faster product.
                sides["GEMV, rank 1"] = Layers(functools.partial(Fused, 1), width, layers)
                sides[f"lora_linear ({kernels()})"] = Layers(functools.partial(Fused, RANK), width, layers)
            x = normal(tokens, width)
            pair = (f"lora_linear ({kernels()})", "GEMV, rank 1")
            ratios = {"lora_linear / GEMV, rank 1": pair} if tokens <= 64 else {}
            yield compare(
                f"forward, {layers} layers {width} x {width}, rank {RANK}, {tokens} tokens",
                sides,
                (x,),
                rounds,
                "goal: 1.03",
                ratios,
            )


def training(quick: bool, rounds: int) -> Iterator[Dict[str, Any]]:
    """Yields the table of forward and backward over frozen layers."""
    width, tokens, layers = (256, 64, 2) if quick else (2048, 512, 2)
    sides = {
        BASE: Layers(Base, width, layers),
        AGAIN: Layers(Base, width, layers),
        "composed, autodiff": Layers(PlainDelta, width, layers),
        "composed, own backward": Layers(functools.partial(WithDelta, "composed"), width, layers),
        f"lora_delta ({kernels()})": Layers(functools.partial(WithDelta, kernels()), width, layers),
        CELL: Layers(adapted_cell, width, layers).set_train(),
    }
    steps = {side: Step(network) for side, network in sides.items()}
    yield compare(
        f"forward and backward, {layers} frozen layers {width} x {width}, rank {RANK}, {tokens} tokens",
        steps,
        (normal(tokens, width),),
        rounds,
        "goal: 1.04",
    )
    yield several_adapters(quick, rounds)


def several_adapters(quick: bool, rounds: int) -> Dict[str, Any]:
    """Returns the table of training several adapters side by side, all on the same number of rows."""
    adapters, width, tokens = (2, 256, 64) if quick else (8, 1024, 1024)
    indices = np.repeat(np.arange(adapters, dtype=np.int32), tokens // adapters)
    sides = {
        BASE: Layers(functools.partial(stacked_cell, adapters), width, 1),
        AGAIN: Layers(functools.partial(stacked_cell, adapters), width, 1),
        f"multi_lora_delta ({kernels()})": Served(Layers(Base, width, 1), Pool(adapters, RANK, width), indices),
    }
    steps = {side: Step(network) for side, network in sides.items()}
    return compare(
        f"forward and backward, {adapters} adapters of rank {RANK}, frozen layer {width} x {width}, {tokens} tokens; "
        "base: StackedLoRADense, products batched over the adapters",
        steps,
        (normal(tokens, width),),
        rounds,
        "the faster one trains",
    )


def many(quick: bool, rounds: int) -> Iterator[Dict[str, Any]]:
    """Yields the tables of many adapters: one or many in a batch, few or many registered, and switches."""
    for table in (one_or_many, few_or_many_registered, switching):
        yield table(quick, rounds)


def one_or_many(quick: bool, rounds: int) -> Dict[str, Any]:
    """Returns the table of batches with one adapter and with many."""
    width, tokens = (256, 32) if quick else (4096, 32)
    ranks = np.linspace(4, 64, tokens).round().astype(np.int32)
    pool = Pool(tokens, 64, width)
    base = Layers(Base, width, 1)
    one = np.full(tokens, tokens // 2, np.int32)
    each = np.arange(tokens, dtype=np.int32)
    pool.ranks.set_data(Tensor(ranks))
    x = normal(tokens, width)
    sides = {
        BASE: Served(base, pool, one),
        AGAIN: Served(base, pool, one),
        "32 adapters": Served(base, pool, each),
        "no adapter": Served(base, pool, np.full(tokens, -1, np.int32)),
        "without the operator": base,
    }
    return compare(
        f"base + multi_lora_delta, {tokens} rows, width {width}; base: one adapter of rank "
        f"{ranks[tokens // 2]}; 32 adapters: ranks 4 to 64",
        sides,
        (x,),
        rounds,
        "goal of 32 adapters: 1.08",
    )


def few_or_many_registered(quick: bool, rounds: int) -> Dict[str, Any]:
    """Returns the table of a batch of 10 adapters while few or many are registered."""
    width = 128 if quick else 1024
    sides = {}
    rng = np.random.default_rng(0)
    # On an NPU, the kernel finds an adapter's rows with an on-chip table, which has no room for 10,000.
    most = 10000 if kernels() == "cpu" else 8000
    for name, slots in ((BASE, 10), (AGAIN, 10), ("1,000 registered", 1000), (f"{most:,} registered", most)):
        indices = np.resize(rng.permutation(slots)[:10], 32).astype(np.int32)
        sides[name] = Served(Layers(Base, width, 1), Pool(slots, 8, width), indices)
    return compare(
        f"base + multi_lora_delta, 32 rows of 10 adapters, width {width}, rank 8; base: 10 registered",
        sides,
        (normal(32, width),),
        rounds,
        "goal: 1.05",
    )


def switching(quick: bool, rounds: int) -> Dict[str, Any]:
    """Returns the table of activating another adapter."""
    width = 256 if quick else 4096
    pool = Pool(4, 64, width)
    write = MultiLoraSlotWrite()
    packed = normal(RANK, 2 * width)
    slot = Tensor([1], ms.int32)
    scale = Tensor(1.0, ms.float32)
    indices = np.full(32, 16, np.int32)
    timings = {
        "new indices (the adapter is resident)": lambda: Tensor(indices),
        "slot write (the adapter is in host memory)": lambda: write(
            pool.pool, pool.ranks, pool.scales, slot, packed, scale
        ).asnumpy(),
        "memcpy of as many bytes": functools.partial(np.copyto, packed.asnumpy().copy(), packed.asnumpy()),
    }
    return compare(
        f"making an adapter of rank {RANK} the active one, width {width}",
        timings,
        (),
        10 * rounds,
        "goal of a resident one: 50 us",
    )


def normal(*shape: int) -> Tensor:
    """Returns normal values of scale 1 / sqrt(last axis), so that layers preserve the scale of their inputs."""
    return Tensor(np.random.default_rng(0).standard_normal(shape, np.float32) / shape[-1] ** 0.5, dtype())


def kernels() -> str:
    """Returns the path of the kernels on this device."""
    return DEVICES[ms.get_context("device_target")][0]


def dtype() -> Any:
    """Returns the dtype of the measurements on this device."""
    return DEVICES[ms.get_context("device_target")][1]


@functools.lru_cache(maxsize=None)
def frozen(width: int, index: int) -> Parameter:
    """Returns a weight shared by all sides: its memory location can change a MatMul's time by a few percent."""
    return Parameter(normal(width, width), name=f"weight{index}", requires_grad=False)


class Base(nn.Cell):
    """y = x W^T, frozen."""

    def __init__(self, width, index):
        super().__init__()
        self.weight = frozen(width, index)
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight)


class Lora(Base):
    """Base with A, B and a scale."""

    def __init__(self, width, index, rank=RANK):
        super().__init__(width, index)
        self.a = Parameter(normal(rank, width))
        self.b = Parameter(normal(width, rank))
        self.scale = Tensor(0.5, ms.float32)


class PlainDelta(Lora):
    """The low-rank path in plain operators, with MindSpore's gradient."""

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight) + self.matmul(self.matmul(x, self.a) * self.scale, self.b)


class WithDelta(Lora):
    """The frozen product, then lora_delta on a path."""

    def __init__(self, path, width, index):
        super().__init__(width, index)
        self.delta = on_path(LoraDelta, path)

    def construct(self, x: Tensor) -> Tensor:
        return self.delta(self.matmul(x, self.weight), x, self.a, self.b, self.scale)


class Fused(Lora):
    """lora_linear as one kernel."""

    def __init__(self, rank, width, index):
        super().__init__(width, index, rank)
        self.linear = on_path(LoraLinear, kernels())

    def construct(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight, self.a, self.b, self.scale)


def adapted_cell(width: int, index: int) -> LoRADense:
    """Returns a linear cell with LoRA as users get it, on the path that it chooses itself."""
    dense = nn.Dense(width, width, has_bias=False, dtype=dtype())
    dense.weight = frozen(width, index)
    return LoRADense.from_dense(dense, LoraConfig(lora_rank=RANK, lora_alpha=RANK / 2, lora_b_init="normal"))


def stacked_cell(adapters: int, width: int, index: int) -> StackedLoRADense:
    """Returns a linear cell with several adapters, as in a run with pet_config.adapters."""
    alone = [adapted_cell(width, index) for _ in range(adapters)]
    for cell in alone:
        cell.name_parts(f"layer{index}")
    dense = nn.Dense(width, width, has_bias=False, dtype=dtype())
    dense.weight = frozen(width, index)
    stacked = StackedLoRADense.from_cells(dense, alone)
    stacked.mindpet_delta_lora_a.set_data(normal(adapters, RANK, width))
    stacked.mindpet_delta_lora_b.set_data(normal(adapters, width, RANK))
    return stacked


class Layers(nn.Cell):
    """Consecutive layers, each with its own weight, so that, as in a decode step, no weight is in the cache."""

    def __init__(self, kind, width, count):
        super().__init__()
        self.layers = nn.CellList([kind(width, index) for index in range(count)])

    def construct(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Loss(nn.Cell):
    """mean(network(x)^2)."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x: Tensor) -> Tensor:
        return ops.square(self.network(x)).mean()


class Step(nn.Cell):
    """The gradients of x, A and B; earlier layers would need the gradient of x."""

    def __init__(self, network):
        super().__init__()
        self.loss = Loss(network)
        self.weights = ms.ParameterTuple(network.trainable_params())
        self.grad = ops.GradOperation(get_all=True, get_by_list=len(self.weights) > 0)

    def construct(self, x: Tensor) -> Tensor:
        if len(self.weights) > 0:
            return self.grad(self.loss, self.weights)(x)
        return self.grad(self.loss)(x)


class Pool(nn.Cell):
    """A pool of adapters for square layers, all of full rank unless `ranks` is changed."""

    def __init__(self, slots, max_rank, width):
        super().__init__()
        self.pool = Parameter(Tensor(np.full((slots, max_rank, 2 * width), 1 / width, np.float32), dtype()))
        self.ranks = Parameter(Tensor(np.full(slots, max_rank, np.int32)), requires_grad=False)
        self.scales = Parameter(Tensor(np.full(slots, 0.5, np.float32)), requires_grad=False)


class Served(nn.Cell):
    """A frozen layer and multi_lora_delta."""

    def __init__(self, base, pool, indices):
        super().__init__()
        self.base = base
        self.pool = pool
        self.indices = Tensor(indices)
        self.delta = on_path(MultiLoraDelta, kernels())

    def construct(self, x: Tensor) -> Tensor:
        return self.delta(self.base(x), x, self.pool.pool, self.pool.ranks, self.pool.scales, self.indices)


def on_path(kind: Callable[[], nn.Cell], path: str) -> nn.Cell:
    """Returns a cell on a given path, whichever path it would choose itself."""
    before = os.environ.get("MINDLORA_BACKEND")
    os.environ["MINDLORA_BACKEND"] = path
    try:
        return kind()
    finally:
        if before is None:
            del os.environ["MINDLORA_BACKEND"]
        else:
            os.environ["MINDLORA_BACKEND"] = before
