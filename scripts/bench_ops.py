"""Benchmark: the operators of mindlora.ops in graph mode, beside the frozen layer alone; float32, float16 on an NPU.

The sides of a table take turns in one process, in every order, on the same data. Each figure is the median over the
rounds; each ratio is the median of the ratios within a round, since what else runs on the machine disturbs both sides
of a round alike. Beside the time on the clock stands the time that the process computed, which is disturbed less. Every
table holds its base twice: how far the ratio of the two is from 1 is how far a ratio there can be trusted.
    python scripts/bench_ops.py --json figures.json
    python scripts/bench_ops.py --quick
    python scripts/bench_ops.py --device Ascend --json figures.json
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
import time

# Before MindSpore is imported, as mindlora-run sets it: threads that spin between kernels disturb the next side.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("GLOG_v", "3")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn, ops  # noqa: E402

from mindlora import LoraConfig, LoRADense  # noqa: E402
from mindlora.ops import LoraDelta, LoraLinear, MultiLoraDelta, MultiLoraSlotWrite, backend_report  # noqa: E402

RANK, WARM_UP = 16, 4
# The path of the kernels and the dtype, by device.
DEVICES = {"CPU": ("cpu", ms.float32), "Ascend": ("ascend", ms.float16)}
BASE, AGAIN, CELL = "base", "base, again", "LoRADense"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="measured rounds of each table (default: 40, with --quick 5)")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds, to see that it runs")
    parser.add_argument("--only", choices=["forward", "training", "many"], help="one part alone")
    parser.add_argument("--device", choices=list(DEVICES), default="CPU", help="default: CPU")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE, device_target=args.device)
    rounds, tables = args.rounds or (5 if args.quick else 40), []
    print("{cpu}, {cores} cores, MindSpore {mindspore}, load {load_average}\n".format(**machine()))
    print(f"{backend_report()}\n")
    for part, measure in (("forward", forward), ("training", training), ("many", many)):
        if args.only in (None, part):
            for figures in measure(args.quick, rounds):
                tables.append(figures)
                print(f"{text(figures)}\n", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine(), "rounds": rounds, "tables": tables}, file, indent=2)


def forward(quick, rounds):
    """Yields a table for each width and number of tokens: layers with LoRA beside the same layers without."""
    for width, layers in ((256, 4),) if quick else ((2048, 4), (4096, 2)):
        for tokens in (1, 4, 8, 512):
            sides = {
                BASE: Layers(Base, width, layers),
                AGAIN: Layers(Base, width, layers),
                "composed": Layers(functools.partial(WithDelta, "composed"), width, layers),
                f"lora_delta ({kernels()})": Layers(functools.partial(WithDelta, kernels()), width, layers),
                CELL: Layers(adapted_cell, width, layers),
            }
            if tokens <= 8:
                # The same GEMV with next to no delta: what is fused, apart from what is a faster product.
                sides["GEMV, rank 1"] = Layers(functools.partial(Fused, 1), width, layers)
                sides[f"lora_linear ({kernels()})"] = Layers(functools.partial(Fused, RANK), width, layers)
            x = normal(tokens, width)
            pair = (f"lora_linear ({kernels()})", "GEMV, rank 1")
            ratios = {"lora_linear / GEMV, rank 1": pair} if tokens <= 8 else {}
            yield compare(
                f"forward, {layers} layers {width} x {width}, rank {RANK}, {tokens} tokens",
                sides,
                (x,),
                rounds,
                "goal: 1.03",
                ratios,
            )


def training(quick, rounds):
    """Yields the table of a forward and backward over frozen layers."""
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


def many(quick, rounds):
    """Yields the tables of many adapters: one or many in a batch, few or many registered, and switching."""
    width, tokens = (256, 32) if quick else (4096, 32)
    ranks = np.linspace(4, 64, tokens).round().astype(np.int32)
    pool = Pool(tokens, 64, width)
    base = Layers(Base, width, 1)
    one, each = np.full(tokens, tokens // 2, np.int32), np.arange(tokens, dtype=np.int32)
    pool.ranks.set_data(Tensor(ranks))
    x = normal(tokens, width)
    sides = {
        BASE: Served(base, pool, one),
        AGAIN: Served(base, pool, one),
        "32 adapters": Served(base, pool, each),
        "no adapter": Served(base, pool, np.full(tokens, -1, np.int32)),
        "without the operator": base,
    }
    yield compare(
        f"base + multi_lora_delta, {tokens} rows, width {width}; base: one adapter of rank "
        f"{ranks[tokens // 2]}; 32 adapters: ranks 4 to 64",
        sides,
        (x,),
        rounds,
        "goal of 32 adapters: 1.08",
    )

    width = 128 if quick else 1024
    sides, rng = {}, np.random.default_rng(0)
    # An NPU's kernel finds the rows of an adapter by a table on the chip, which has no room for so many.
    most = 10000 if kernels() == "cpu" else 8000
    for name, slots in ((BASE, 10), (AGAIN, 10), ("1,000 registered", 1000), (f"{most:,} registered", most)):
        pool = Pool(slots, 8, width)
        sides[name] = Served(Layers(Base, width, 1), pool, np.resize(rng.permutation(slots)[:10], 32).astype(np.int32))
    yield compare(
        f"base + multi_lora_delta, 32 rows of 10 adapters, width {width}, rank 8; base: 10 registered",
        sides,
        (normal(32, width),),
        rounds,
        "goal: 1.05",
    )

    width = 256 if quick else 4096
    pool = Pool(4, 64, width)
    write, packed = MultiLoraSlotWrite(), normal(RANK, 2 * width)
    slot, scale = Tensor([1], ms.int32), Tensor(1.0, ms.float32)
    timings = {
        "new indices (the adapter is resident)": lambda: Tensor(one),
        "slot write (the adapter is in host memory)": lambda: write(
            pool.pool, pool.ranks, pool.scales, slot, packed, scale
        ).asnumpy(),
        "memcpy of as many bytes": functools.partial(np.copyto, packed.asnumpy().copy(), packed.asnumpy()),
    }
    yield compare(
        f"making an adapter of rank {RANK} the active one, width {width}",
        timings,
        (),
        10 * rounds,
        "goal of a resident one: 50 us",
    )


def normal(*shape):
    """Returns normal values of size 1 / sqrt(last axis), so that layers keep the size of what goes through them."""
    return Tensor(np.random.default_rng(0).standard_normal(shape, np.float32) / shape[-1] ** 0.5, dtype())


def kernels():
    """Returns the path of the kernels on this device."""
    return DEVICES[ms.get_context("device_target")][0]


def dtype():
    """Returns the dtype in which this device is measured."""
    return DEVICES[ms.get_context("device_target")][1]


@functools.lru_cache(maxsize=None)
def frozen(width, index):
    """Returns a weight that all sides share: where it lies in memory can change a MatMul's time by some percent."""
    return Parameter(normal(width, width), name=f"weight{index}", requires_grad=False)


class Base(nn.Cell):
    """y = x W^T, frozen."""

    def __init__(self, width, index):
        super().__init__()
        self.weight = frozen(width, index)
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x):
        return self.matmul(x, self.weight)


class Lora(Base):
    """Base with A, B and a scale."""

    def __init__(self, width, index, rank=RANK):
        super().__init__(width, index)
        self.a, self.b = Parameter(normal(rank, width)), Parameter(normal(width, rank))
        self.scale = Tensor(0.5, ms.float32)


class PlainDelta(Lora):
    """The low-rank path in plain operators, with MindSpore's gradient."""

    def construct(self, x):
        return self.matmul(x, self.weight) + self.matmul(self.matmul(x, self.a) * self.scale, self.b)


class WithDelta(Lora):
    """The frozen product, then lora_delta on a path."""

    def __init__(self, path, width, index):
        super().__init__(width, index)
        self.delta = on_path(LoraDelta, path)

    def construct(self, x):
        return self.delta(self.matmul(x, self.weight), x, self.a, self.b, self.scale)


class Fused(Lora):
    """lora_linear as one kernel."""

    def __init__(self, rank, width, index):
        super().__init__(width, index, rank)
        self.linear = on_path(LoraLinear, kernels())

    def construct(self, x):
        return self.linear(x, self.weight, self.a, self.b, self.scale)


def adapted_cell(width, index):
    """Returns what users get: a linear cell with LoRA on it, on the path that it picks by itself."""
    dense = nn.Dense(width, width, has_bias=False, dtype=dtype())
    dense.weight = frozen(width, index)
    return LoRADense.from_dense(dense, LoraConfig(lora_rank=RANK, lora_alpha=RANK / 2, lora_b_init="normal"))


class Layers(nn.Cell):
    """Layers after each other, each with a weight of its own, as a decode step finds them: not in the cache."""

    def __init__(self, kind, width, count):
        super().__init__()
        self.layers = nn.CellList([kind(width, index) for index in range(count)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Loss(nn.Cell):
    """mean(network(x)^2)."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, x):
        return ops.square(self.network(x)).mean()


class Step(nn.Cell):
    """The gradients of x, A and B: x stands for the layers in front of these."""

    def __init__(self, network):
        super().__init__()
        self.loss = Loss(network)
        self.weights = ms.ParameterTuple(network.trainable_params())
        self.grad = ops.GradOperation(get_all=True, get_by_list=len(self.weights) > 0)

    def construct(self, x):
        if len(self.weights) > 0:
            return self.grad(self.loss, self.weights)(x)
        return self.grad(self.loss)(x)


class Pool(nn.Cell):
    """A pool of adapters for square layers, all of the full rank until told otherwise."""

    def __init__(self, slots, max_rank, width):
        super().__init__()
        self.pool = Parameter(Tensor(np.full((slots, max_rank, 2 * width), 1 / width, np.float32), dtype()))
        self.ranks = Parameter(Tensor(np.full(slots, max_rank, np.int32)), requires_grad=False)
        self.scales = Parameter(Tensor(np.full(slots, 0.5, np.float32)), requires_grad=False)


class Served(nn.Cell):
    """A frozen layer and multi_lora_delta."""

    def __init__(self, base, pool, indices):
        super().__init__()
        self.base, self.pool, self.indices = base, pool, Tensor(indices)
        self.delta = on_path(MultiLoraDelta, kernels())

    def construct(self, x):
        return self.delta(self.base(x), x, self.pool.pool, self.pool.ranks, self.pool.scales, self.indices)


def on_path(kind, path):
    """Returns a cell of a path, whatever would be picked."""
    before = os.environ.get("MINDLORA_BACKEND")
    os.environ["MINDLORA_BACKEND"] = path
    try:
        return kind()
    finally:
        if before is None:
            del os.environ["MINDLORA_BACKEND"]
        else:
            os.environ["MINDLORA_BACKEND"] = before


def compare(title, sides, inputs, rounds, remark, ratios=()):
    """Returns what was measured of sides that take turns: seconds on the clock and computed, and their ratios."""
    times = {side: [] for side in sides}
    orders = list(itertools.permutations(sides))
    np.random.default_rng(0).shuffle(orders)
    for i in range(WARM_UP + rounds):
        for side in map(str, orders[i % len(orders)]):
            start, computed = time.perf_counter(), time.process_time()
            wait(sides[side](*inputs))
            times[side].append((time.perf_counter() - start, time.process_time() - computed))
    clocks = {side: [*zip(*pairs[WARM_UP:])] for side, pairs in times.items()}
    pairs = dict(ratios)
    if BASE in sides:
        pairs.update({f"{side} / {BASE}": (side, BASE) for side in sides if side != BASE})
    return {
        "title": title,
        "remark": remark,
        "seconds": {side: {"wall": spread(wall), "cpu": spread(cpu)} for side, (wall, cpu) in clocks.items()},
        "ratios": {
            name: [
                statistics.median(a / b for a, b in zip(clocks[first][clock], clocks[second][clock]))
                for clock in (0, 1)
            ]
            for name, (first, second) in pairs.items()
        },
    }


def wait(result):
    """Waits for what a network returns."""
    if isinstance(result, (tuple, list)):
        for item in result:
            wait(item)
    elif isinstance(result, Tensor):
        result.asnumpy()


def spread(seconds):
    """Returns median, quartiles and least of a list."""
    low, _, high = statistics.quantiles(seconds, n=4)
    return {
        "median": statistics.median(seconds),
        "lower_quartile": low,
        "upper_quartile": high,
        "min": min(seconds),
        "count": len(seconds),
    }


def machine():
    """Returns what the figures depend on."""
    model = "unknown"
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "mindspore": ms.__version__,
        "load_average": round(os.getloadavg()[0], 1),
    }


def text(figures):
    head = f"{'milliseconds':<44}{'median':>9}{'quartiles':>19}{'min':>9}{'CPU':>9}{'ratio':>8}{'CPU':>7}"
    lines = [figures["title"], head]
    for side, clocks in figures["seconds"].items():
        wall, cpu = ({name: 1e3 * value for name, value in clocks[clock].items()} for clock in ("wall", "cpu"))
        ratio = figures["ratios"].get(f"{side} / {BASE}")
        lines.append(
            f"{side:<44}{wall['median']:>9.3f}{wall['lower_quartile']:>10.3f}{wall['upper_quartile']:>9.3f}"
            f"{wall['min']:>9.3f}{cpu['median']:>9.3f}" + ("{:>8.3f}{:>7.3f}".format(*ratio) if ratio else "")
        )
    lines += [
        "{:<90}{:>8.3f}{:>7.3f}".format(name, *ratio)
        for name, ratio in figures["ratios"].items()
        if not name.endswith(f" / {BASE}")
    ]
    return "\n".join(lines + [f"({figures['remark']})"])


if __name__ == "__main__":
    main()
