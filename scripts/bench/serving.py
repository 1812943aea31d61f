"""Serving many adapters on one base: against only the base, against PEFT on PyTorch, and under load.

    decode    one adapter and eight, ranks, popularity: against only the base, in steps and through the complete engine
    peft      transformers and PEFT with the Python that MINDLORA_PEERS_PYTHON names: decoding, reading a prompt
    vllm      vLLM on a CPU, with the Python that MINDLORA_VLLM_PYTHON names: answers in 16 bits, and ours in NF4
    nf4       a base of twice the width in NF4 against float32
    pools     slots in 16 and in 32 bits, against only the base
    adapters  from disk to the first token, switching between two, 10,000 registered adapters
    load      requests that arrive at random times, for 64 adapters over 16 slots
    attention decode attention against a bare read of its keys and values
    product   the linear layers of a step against a bare read of their weights
    border    the graphs of few and of many tokens, near the border where the runner switches
    mask      the cost of a constraint per step
    lookup    prompt lookup, with answers that copy their prompt and answers that do not

A random Llama is made in a temporary folder, with PEFT folders of random adapters. The sides of a table take turns in
one process (PyTorch in another, which waits meanwhile), each with two threads; each figure is the median over the
rounds, each ratio the median of the ratios within a round. If the base is measured twice, no ratio is more accurate
than the difference of these two's ratio from 1. On a processor with AVX-512, ONEDNN_MAX_CPU_ISA=AVX2 restricts both
sides to AVX2.
"""

import argparse
import contextlib
import dataclasses
import gc
import os
import resource
import tempfile
import time
from typing import Any, Callable, Dict, Iterator

from bench.common import add_number, limit_operators, load_average
from mindlora.core.operator_library import load_before_mindspore

PEERS = ("peft", "vllm")
PARTS = ("decode", *PEERS, "nf4", "pools", "adapters", "load", "attention", "product", "border", "mask", "lookup")
# Both sides of a comparison get this number of threads, whether in this process or in another.
THREADS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_number(parser, "--rounds", 30, 5, "measured rounds")
    parser.add_argument("--peer", choices=PEERS, help="the comparison with this one only")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="some parts only")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints the tables and returns their figures."""
    prepare_process()
    import mindspore as ms

    from bench.serving_model import FULL, QUICK, Files

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    size = dataclasses.replace(QUICK if args.quick else FULL, rounds=args.rounds)
    limit_operators()
    print(f"{size}; {THREADS} threads\n", flush=True)
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "log.txt"), "w", encoding="utf-8") as log:
        # MindFormers writes output/ in the working folder, and logs to the stdout that it finds at import.
        os.chdir(folder)
        with contextlib.redirect_stdout(log):
            import mindformers  # noqa: F401
        tables = []
        for part in [args.peer] if args.peer else args.only:
            tables += measure(part, Files(folder), size)
    peak = {
        "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "of a child, GB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
    }
    print("peak memory: " + ", ".join(f"{name} {value:.1f}" for name, value in peak.items()))
    return {"peak_memory": peak, "threads": THREADS, "size": dataclasses.asdict(size), "tables": tables}


def prepare_process() -> None:
    """Limits this process to THREADS cores, and sets what the server sets before MindSpore is imported."""
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    # Without this variable, MindFormers builds networks for training.
    os.environ["RUN_MODE"] = "predict"
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    load_before_mindspore()


def measure(part: str, files: Any, size: Any) -> Iterator[Dict[str, Any]]:
    """Prints and yields the tables of a part."""
    from bench.serving_engine import text

    begin = time.perf_counter()
    for figures in tables_of(part)(files, size):
        table = {"part": part, "load_average": load_average(), **figures}
        print(f"{text(table)}\n(load {table['load_average']})\n", flush=True)
        yield table
    gc.collect()
    print(f"{part}: {time.perf_counter() - begin:.0f} s\n", flush=True)


def tables_of(part: str) -> Callable[[Any, Any], Iterator[Dict[str, Any]]]:
    """Returns the function that yields the tables of a part."""
    from bench import serving_adapters, serving_decode, serving_kernels, serving_lookup, serving_peft, serving_vllm

    return {
        "decode": serving_decode.decode,
        "peft": serving_peft.against_peft,
        "vllm": serving_vllm.against_vllm,
        "nf4": serving_decode.nf4,
        "pools": serving_decode.pools,
        "adapters": serving_adapters.adapters,
        "load": serving_adapters.load,
        "attention": serving_kernels.attention,
        "product": serving_kernels.product,
        "border": serving_kernels.border,
        "mask": serving_kernels.mask,
        "lookup": serving_lookup.lookup,
    }[part]
