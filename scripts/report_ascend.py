"""Report: the bytes, operations and busy cores of the Ascend C kernels, as counted by the simulator.

The simulator (tests/support/ascendc_model) is not CANN and not an NPU: it counts bytes of global memory, repeats of the
vector unit (products of two fractals on a cube core) and busy cores, and knows nothing about time. "repeats" are the
busiest core's. The time at best is the larger of the bytes over the bandwidth and these repeats over 1.8 GHz: the
minimal bytes over 1.6 TB/s, and bytes that cores exchange or read again over twice that, since the second-level cache
serves them. "time" is the time at best over the bound in which all cores share both the minimal bytes and the vector
cores' repeats. The shapes are the linear layers of Llama 7B and 13B in bfloat16, on a chip of 24 cube and 48 vector
cores. Bytes are relative to the minimum, each input and output once.

For comparison, the report computes a composition of plain kernels: x A^T; scale; B^T; add; with many adapters also
gathering each adapter's rows and putting them back; for NF4 weights, codes to integers, two look-ups, their
concatenation, times absmax, cast. Each kernel reads its inputs and writes its output once, a product is distributed in
output tiles of 16 x 256, and the core count is that of the kernel with the fewest.
    python scripts/report_ascend.py --json figures.json
    python scripts/report_ascend.py --only lora_delta
    python scripts/report_ascend.py --border             where cells take plain operators, by the plan's estimate
"""

import math
import sys
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np

from bench import common
from tests.support.ascendc_model import kernels

LAYERS = {"7B": [(4096, 4096), (4096, 11008), (11008, 4096)], "13B": [(5120, 5120), (5120, 13824), (13824, 5120)]}
TOKENS, RANKS, ADAPTERS = (1, 8, 32, 512), (8, 16, 64), (1, 4, 32)
BYTES = 2  # of bfloat16
# The shapes that --border shows; the last is an output head.
BORDER_RANKS = (8, 16, 32, 64, 128)
BORDER_LAYERS = [(2048, 2048), (4096, 4096), (8192, 8192), (4096, 11008), (4096, 65535), (4096, 65536), (4096, 152064)]
# A step of up to this many tokens counts as decode; lora_linear is only for decode.
DECODE = 8
GOAL = 1.15  # of the time at best
BYTES_PER_REPEAT = 889  # 1.6 TB/s over 1.8 GHz
CACHE = 2  # speed-up of the second-level cache: kCache in ops/ascendc_common/plan.h


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", choices=list(OPS), help="one operator only")
    parser.add_argument("--layers", choices=list(LAYERS), help="one model's layers only")
    parser.add_argument("--border", action="store_true", help="where cells take plain operators in place of lora_delta")
    args = parser.parse_args()
    if args.border:
        border()
        return
    print(
        f"In a simulator of Ascend C, not on an NPU: bfloat16, {kernels.CUBE_CORES} cube and "
        f"{kernels.VECTOR_CORES} vector cores.\nGoal: time at best at most {GOAL} of the bound.\n"
    )
    print(
        f"{'operator':<22}{'K':>6}{'N':>7}{'rank':>6}{'tokens':>8}{'adapters':>10}   {'bytes':>6} {'repeats':>8} "
        f"{'time':>6} {'cores':>6}   {'composed: bytes':>15} {'cores':>6}"
    )
    rows = []
    for op in [args.only] if args.only else OPS:
        for layers in [args.layers] if args.layers else LAYERS:
            for in_channels, out_channels in LAYERS[layers]:
                for case in OPS[op](in_channels, out_channels):
                    rows.append({"op": op, "model": layers, "K": in_channels, "N": out_channels, **case})
                    print(line(rows[-1]), flush=True)
    print(f"\n{summary(rows)}")
    cores = {"cube_cores": kernels.CUBE_CORES, "vector_cores": kernels.VECTOR_CORES}
    common.write_json(args.json, {**cores, "rows": rows})


def border() -> None:
    """Prints the estimates by which a cell's path is chosen, relative to the time of the minimal bytes."""
    from mindlora.ops import backend

    tokens, far = backend.TOKENS_OF_A_CELL, backend.FAR_ABOVE
    print(
        f"By the plan's estimate, no measurement: {tokens} tokens, over the time of the least bytes. A cell takes "
        f"plain operators where the kernel takes more than {far} times as long (*)."
    )
    print(f"{'':<10}{'K':>6}{'N':>8}" + "".join(f"{f'rank {rank}':>18}" for rank in BORDER_RANKS))
    for dtype, element_bytes in (("float32", 4), ("16 bits", BYTES)):
        for k, n in BORDER_LAYERS:
            columns = []
            for rank in BORDER_RANKS:
                least, kernel, plain = backend.lora_delta_times(tokens, k, n, rank, element_bytes)
                columns.append(f"{kernel / least:8.2f} of {plain / least:.2f}{'*' if kernel > far * plain else ' '}")
            print(f"{dtype:<10}{k:>6}{n:>8}" + "".join(f"{column:>18}" for column in columns))


def lora_delta(k: int, n: int) -> Iterator[Dict[str, Any]]:
    """Yields the figures of lora_delta for a layer."""
    for rank in RANKS:
        for tokens in TOKENS:
            y0, x, a, b = (random(*shape) for shape in ((tokens, n), (tokens, k), (rank, k), (n, rank)))
            report = run(
                "lora_delta",
                [("y0", y0), ("x", x), ("a", a), ("b", b), ("scale", SCALE)],
                (tokens, n),
                (tokens, k, n, rank),
            )
            least = BYTES * (2 * y0.size + x.size + a.size + b.size) + SCALE.nbytes
            yield figures(
                report, least, rank, tokens, 1, composed_delta(tokens, k, n, rank) / least, product_cores(tokens, rank)
            )


def lora_linear(k: int, n: int) -> Iterator[Dict[str, Any]]:
    """Yields the figures of lora_linear for a layer, without a bias."""
    for rank in RANKS:
        for tokens in (t for t in TOKENS if t <= DECODE):
            x, w, a, b = (random(*shape) for shape in ((tokens, k), (n, k), (rank, k), (n, rank)))
            report = run(
                "lora_linear",
                [("x", x), ("w", w), ("a", a), ("b", b), ("scale", SCALE), ("bias", b)],
                (tokens, n),
                (tokens, k, n, rank, 0),
            )
            least = BYTES * (x.size + w.size + a.size + b.size + tokens * n) + SCALE.nbytes
            base = BYTES * (x.size + w.size + tokens * n)
            yield figures(
                report,
                least,
                rank,
                tokens,
                1,
                (base + composed_delta(tokens, k, n, rank)) / least,
                product_cores(tokens, rank),
            )


def multi_lora_delta(k: int, n: int) -> Iterator[Dict[str, Any]]:
    """Yields the figures of multi_lora_delta for a layer. Rows are shared evenly and grouped by adapter."""
    for rank in RANKS:
        for tokens in TOKENS:
            for adapters in (count for count in ADAPTERS if count <= tokens):
                y0 = random(tokens, n)
                x = random(tokens, k)
                pool = random(adapters, rank, k + n)
                indices = np.sort(np.arange(tokens, dtype=np.int32) % adapters)
                ranks = np.full(adapters, rank, np.int32)
                scales = np.full(adapters, 0.5, np.float32)
                report = run(
                    "multi_lora_delta",
                    [("y0", y0), ("x", x), ("pool", pool), ("ranks", ranks), ("scales", scales), ("indices", indices)],
                    (tokens, n),
                    (tokens, adapters, rank, k, n),
                )
                least = BYTES * (2 * y0.size + x.size + pool.size) + 4 * (2 * adapters + tokens)
                each = [int(np.sum(indices == i)) for i in range(adapters)]
                # The adapter's rows of x and y0 are gathered, and y is put back: each is read and written.
                moved = sum(
                    composed_delta(rows, k, n, rank) + 2 * BYTES * rows * (k + 2 * n) * (adapters > 1) for rows in each
                )
                yield figures(
                    report,
                    least,
                    rank,
                    tokens,
                    adapters,
                    moved / least,
                    min(product_cores(rows, rank) for rows in each),
                )


def nf4_dequantize(k: int, n: int) -> Iterator[Dict[str, Any]]:
    """Yields the figures of nf4_dequantize for a layer. It only computes W, so there are no tokens."""
    blocks = math.ceil(k / 64)
    codes = np.zeros((n, blocks * 32), np.uint8)
    absmax = np.zeros((n, blocks), np.uint8)
    scales = np.zeros(math.ceil(absmax.size / 256), np.float32)
    report = run(
        "nf4_dequantize",
        [("like", random(1)), ("codes", codes), ("absmax", absmax), ("scales", scales), ("offsets", scales)],
        (n, k),
        (n, k),
        "w",
    )
    least = codes.nbytes + absmax.nbytes + 2 * scales.nbytes + BYTES * n * k
    # An integer code and a number of W take 4 bytes each until the cast.
    composed = codes.size * ((1 + 4) + 2 * (4 + 4) + (8 + 8) + (8 + 8) + (8 + 2 * BYTES))
    yield figures(report, least, 0, 0, 0, composed / least, kernels.VECTOR_CORES)


OPS = {
    "lora_delta": lora_delta,
    "lora_linear": lora_linear,
    "multi_lora_delta": multi_lora_delta,
    "nf4_dequantize": nf4_dequantize,
}


def composed_delta(tokens: int, k: int, n: int, rank: int) -> int:
    """Returns the bytes that x A^T, scale, B^T and add move as separate kernels."""
    low = tokens * rank
    wide = tokens * n
    return BYTES * ((tokens * k + rank * k + low) + 2 * low + (low + n * rank + wide) + 3 * wide)


def product_cores(tokens: int, columns: int) -> int:
    """Returns the number of busy cube cores in a product of this shape; of the delta's two, x A^T has the fewest."""
    return min(kernels.CUBE_CORES, math.ceil(tokens / 16) * math.ceil(columns / 256))


def figures(
    report: Dict[str, Any], least: int, rank: int, tokens: int, adapters: int, composed: float, composed_cores: int
) -> Dict[str, Any]:
    """Returns one row of the table."""
    moved = sum(traffic["read"] + traffic["written"] for name, traffic in report["gm"].items() if name != "tiling")
    busiest = max(core["repeats"] for core in report["cores"])
    shared = sum(core["repeats"] for core in report["cores"] if core["name"].startswith("AIV")) / kernels.VECTOR_CORES
    return {
        "rank": rank,
        "tokens": tokens,
        "adapters": adapters,
        "bytes": moved,
        "least": least,
        "ratio": moved / least,
        "repeats": busiest,
        "time": max(least + (moved - least) / CACHE, busiest * BYTES_PER_REPEAT)
        / max(least, shared * BYTES_PER_REPEAT),
        "cores": report["cores_that_worked"],
        "composed_ratio": composed,
        "composed_cores": composed_cores,
    }


def line(row: Dict[str, Any]) -> str:
    """Formats a row as text; a figure beyond its goal has a star."""
    rank, tokens, adapters = (row[name] or "-" for name in ("rank", "tokens", "adapters"))
    return (
        f"{row['op']:<22}{row['K']:>6}{row['N']:>7}{rank:>6}{tokens:>8}{adapters:>10}   "
        f"{row['ratio']:6.3f} {row['repeats']:>8} "
        f"{row['time']:6.3f}{'*' if row['time'] > GOAL else ' '}{row['cores']:>6}   {row['composed_ratio']:15.3f} "
        f"{row['composed_cores']:>6}"
    )


def summary(rows: List[Dict[str, Any]]) -> str:
    """Returns the number of rows within the goal and the range of figures for each operator and kind of step."""
    lines = ["* beyond the goal"]
    for op in dict.fromkeys(row["op"] for row in rows):
        of_operator = [row for row in rows if row["op"] == op]
        decode = [row for row in of_operator if row["tokens"] <= DECODE]
        prefill = [row for row in of_operator if row["tokens"] > DECODE]
        for step, part in (("decode", decode), ("prefill", prefill)):
            if part:
                within = sum(row["time"] <= GOAL for row in part)
                lines.append(
                    f"{op}, {step}: {within} of {len(part)} within {GOAL}; time {bounds(part, 'time')}; bytes "
                    f"{bounds(part, 'ratio')}, composed {bounds(part, 'composed_ratio')}; cores "
                    f"{bounds(part, 'cores', '')}"
                )
    return "\n".join(lines)


def bounds(rows: List[Dict[str, Any]], name: str, form: str = ".3f") -> str:
    """Returns the smallest and the largest value of a column."""
    values = [row[name] for row in rows]
    return f"{min(values):{form}} to {max(values):{form}}"


def run(
    op: str, inputs: List[Tuple[str, np.ndarray]], out_shape: Tuple[int, ...], sizes: Tuple[int, ...], output: str = "y"
) -> Dict[str, Any]:
    """Returns the simulator's report of an operator."""
    return kernels.run(op, "bfloat16", inputs, [(output, np.empty(out_shape, np.uint16), "out")], sizes)


def random(*shape: int) -> np.ndarray:
    """Returns the bits of bfloat16 numbers around 1: the counts do not depend on the values."""
    return np.random.default_rng(0).integers(0x3F00, 0x4000, shape, np.uint16)


SCALE = np.full(1, 0.5, np.float32)

if __name__ == "__main__":
    sys.exit(main())
