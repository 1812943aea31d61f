"""Benchmark: serving many adapters on one base: against the base alone, PEFT on PyTorch, and other loads.

    decode   one adapter and eight, ranks, popularity: against the base alone, in steps and through the whole engine
    b peft     transformers and PEFT with the Python that MINDLORA_PEERS_PYTHON names: decoding, reading a prompt
    c nf4      a base in NF4 against the same in float32, twice as wide
    d adapters from disk to the first token, switching between two, 10,000 registered
    e load     requests that arrive at random, for 64 adapters over 16 slots

A random Llama is made in a temporary folder, with PEFT folders of random adapters. The sides of a table take turns in
one process (PyTorch's in one that waits meanwhile), each with two threads; each figure is the median over the rounds,
each ratio the median of the ratios within a round. Where the base is measured twice, no ratio can be trusted further
than the ratio of these two is from 1.
    python scripts/bench_serving.py --json figures.json
    python scripts/bench_serving.py --quick --only decode
"""

import contextlib
import dataclasses
import gc
import os
import resource
import tempfile
import time
from typing import Any, Callable, Dict, Iterator

import bench_serving_setup  # first: it sets what must be set before MindSpore is imported

# isort: split
import bench_common
import bench_serving_adapters
import bench_serving_decode
import bench_serving_load
import bench_serving_model as model
import bench_serving_peft
import mindspore as ms

PARTS: Dict[str, Callable[[model.Files, model.Size], Iterator[Dict[str, Any]]]] = {
    "decode": bench_serving_decode.decode,
    "peft": bench_serving_peft.against_peft,
    "nf4": bench_serving_decode.nf4,
    "adapters": bench_serving_adapters.adapters,
    "load": bench_serving_load.load,
}


def main() -> None:
    parser = bench_common.parser(__doc__)
    parser.add_argument(
        "--rounds", type=int, help=f"measured rounds (default: {model.FULL.rounds}, with --quick {model.QUICK.rounds})"
    )
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds, to check that it runs")
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS), help="some parts only")
    args = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    size = model.QUICK if args.quick else model.FULL
    size = dataclasses.replace(size, rounds=args.rounds or size.rounds)
    found = bench_common.machine("mindspore", "mindformers")
    print(f"{bench_common.machine_line(found)}\n{size}; {bench_serving_setup.THREADS} threads\n", flush=True)
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.txt"), "w", encoding="utf-8") as log:
        # MindFormers writes output/ in the working folder, and logs to the stdout that it finds when it is imported.
        os.chdir(folder)
        with contextlib.redirect_stdout(log):
            import mindformers  # noqa: F401
        tables = [table for part in args.only for table in measure(part, model.Files(folder), size)]
    peak = {
        "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "of a child, GB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
    }
    print("peak memory: " + ", ".join(f"{name} {value:.1f}" for name, value in peak.items()))
    found = {
        "machine": found,
        "peak_memory": peak,
        "threads": bench_serving_setup.THREADS,
        "size": dataclasses.asdict(size),
    }
    bench_common.write_json(args.json, {**found, "tables": tables})


def measure(part: str, files: model.Files, size: model.Size) -> Iterator[Dict[str, Any]]:
    """Yields the tables of a part, each printed."""
    begin = time.perf_counter()
    for found in PARTS[part](files, size):
        table = {"part": part, "load_average": round(os.getloadavg()[0], 1), **found}
        print(f"{model.text(table)}\n(load {table['load_average']})\n", flush=True)
        yield table
    gc.collect()
    print(f"{part}: {time.perf_counter() - begin:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
