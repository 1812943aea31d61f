"""Common parts of the benchmarks: options, the machine, sides that take turns, tables, and the JSON file."""

import argparse
import ctypes
import importlib.metadata
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from bench import ROOT

# In the order of mindlora_set_isa's numbers.
AVX2 = 1
BASE, AGAIN = "base", "base, again"
WARM_UP = 4
PACKAGES = ("mindspore", "mindformers", "numpy")
# Instruction set -> the flags of /proc/cpuinfo that the CPU operators require for it.
INSTRUCTION_SETS = {
    "AVX-512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
    "AVX2": {"avx2", "fma", "f16c"},
}


class ByQuick(NamedTuple):
    """A default that --quick changes."""

    full: Any
    quick: Any


def parser(description: str, prog: Optional[str] = None) -> argparse.ArgumentParser:
    """Returns a parser that shows a docstring and takes --json."""
    formatter = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(prog=prog, description=description, formatter_class=formatter)
    options.add_argument("--json", metavar="FILE", type=new_file, help="also write the figures to this file")
    return options


def add_number(options: argparse.ArgumentParser, flag: str, full: Any, quick: Any, meaning: str, **kwargs: Any) -> None:
    """Adds an integer option whose default is `full`, or `quick` with --quick; with nargs, both are lists."""
    shown = [" ".join(map(str, value)) if isinstance(value, list) else value for value in (full, quick)]
    meaning = f"{meaning} (default: {shown[0]}, with --quick {shown[1]})"
    options.add_argument(flag, type=int, default=ByQuick(full, quick), help=meaning, **kwargs)


def set_defaults(args: argparse.Namespace) -> None:
    """Sets the default of each option of `add_number` that is not on the command line."""
    for name, value in vars(args).items():
        if isinstance(value, ByQuick):
            setattr(args, name, value.quick if args.quick else value.full)


def new_file(path: str) -> str:
    """Returns the absolute path of a writable file, so that no figures are lost at the end."""
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    if os.path.isdir(path) or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: name a new file in a folder that is there")
    return path


def write_json(path: Optional[str], figures: Dict[str, Any]) -> None:
    """Writes the figures to a file, if a path is given."""
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


def child_command(benchmark: str, *words: str, python: str = sys.executable) -> List[str]:
    """Returns the command that runs a benchmark in a separate process."""
    return [python, os.path.join(ROOT, "scripts", "bench.py"), benchmark, *words]


def machine(*packages: str) -> Dict[str, Any]:
    """Returns the conditions of the figures: processor, instruction set, cores, load and package versions."""
    processor: Dict[str, str] = {}
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                # setdefault, since the first processor represents all.
                processor.setdefault(name.strip(), value.strip())
    flags = set(processor.get("flags", "").split())
    best = next((name for name, required in INSTRUCTION_SETS.items() if required <= flags), "no AVX2")
    return {
        "cpu": processor.get("model name", "unknown processor"),
        "instruction_set": f"{best}, limited to AVX2" if is_limited() else best,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in (*PACKAGES, *packages)},
        "load_average": load_average(),
    }


def is_limited() -> bool:
    """Returns whether ONEDNN_MAX_CPU_ISA limits MindSpore's products to AVX2."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"


def limit_operators() -> None:
    """Limits mindlora's CPU operators to the instruction set of MindSpore's products."""
    if is_limited():
        from mindlora.ops import backend

        ctypes.CDLL(backend.LIBRARY).mindlora_set_isa(AVX2)


def version(package: str) -> str:
    """Returns the version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def load_average() -> float:
    """Returns the load average of the last minute."""
    return round(os.getloadavg()[0], 1)


def machine_line(machine: Dict[str, Any]) -> str:
    """Returns the result of `machine` as one line."""
    hardware = ("cpu", "instruction_set", "cores", "load_average")
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in hardware)
    return "{cpu} ({instruction_set}), {cores} cores, load {load_average}".format(**machine) + f"; {versions}"


def spread(values: Sequence[float]) -> Dict[str, float]:
    """Returns the median, quartiles, minimum and maximum of a list."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return {
        "median": median,
        "lower_quartile": low,
        "upper_quartile": high,
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the median of the ratios within each round.

    Other load on the machine disturbs both sides of a round alike.
    """
    return statistics.median(a / b for a, b in zip(first, second))


def take_turns(sides: Dict[str, Callable[[], Any]], rounds: int, warm_up: int = WARM_UP) -> Dict[str, List[Any]]:
    """Returns each side's results of all rounds after the warm-up.

    Every order of the sides occurs, so that no side always follows the same other side.
    """
    results: Dict[str, List[Any]] = {side: [] for side in sides}
    orders = list(itertools.permutations(sides))
    random.Random(0).shuffle(orders)
    for number in range(warm_up + rounds):
        for side in orders[number % len(orders)]:
            results[side].append(sides[side]())
    return {side: values[warm_up:] for side, values in results.items()}


def timed(call: Callable[..., Any], *inputs: Any) -> Callable[[], Tuple[float, float]]:
    """Returns a function that calls, waits for the result, and returns wall-clock and CPU seconds."""

    def run() -> Tuple[float, float]:
        start = time.perf_counter()
        start_computed = time.process_time()
        wait(call(*inputs))
        return time.perf_counter() - start, time.process_time() - start_computed

    return run


def time_in_turns(
    sides: Dict[str, Callable[..., Any]], rounds: int, warm_up: int = WARM_UP, inputs: Sequence[Any] = ()
) -> Dict[str, Dict[str, Tuple[float, ...]]]:
    """Returns {side: {"wall": wall-clock seconds of its rounds, "cpu": CPU seconds of the process}}."""
    pairs = take_turns({side: timed(call, *inputs) for side, call in sides.items()}, rounds, warm_up)
    return {side: dict(zip(("wall", "cpu"), zip(*times))) for side, times in pairs.items()}


def spreads(clocks: Dict[str, Dict[str, Sequence[float]]]) -> Dict[str, Dict[str, Dict[str, float]]]:
    """Returns {side: {"wall", "cpu": spread}} for the result of `time_in_turns`."""
    return {side: {"wall": spread(times["wall"]), "cpu": spread(times["cpu"])} for side, times in clocks.items()}


def wait(result: Any) -> None:
    """Waits until a network's result has been computed."""
    if isinstance(result, (tuple, list)):
        for item in result:
            wait(item)
    elif hasattr(result, "asnumpy"):
        result.asnumpy()


def compare(
    title: str,
    sides: Dict[str, Callable[..., Any]],
    inputs: Sequence[Any],
    rounds: int,
    remark: str,
    ratios: Optional[Dict[str, Tuple[str, str]]] = None,
) -> Dict[str, Any]:
    """Returns a table of sides that took turns: wall-clock and CPU seconds, and their ratios.

    Each side is compared with BASE, if there is one; `ratios` names further pairs.
    """
    pairs = dict(ratios or {})
    if BASE in sides:
        pairs.update({f"{side} / {BASE}": (side, BASE) for side in sides if side != BASE})
    return compare_clocks(title, time_in_turns(sides, rounds, inputs=inputs), remark, pairs)


def compare_clocks(
    title: str, clocks: Dict[str, Dict[str, Sequence[float]]], remark: str, pairs: Dict[str, Tuple[str, str]]
) -> Dict[str, Any]:
    """Returns the same table for the result of `time_in_turns`, with the ratios of these pairs."""
    ratio_of = {}
    for name, (first, second) in pairs.items():
        ratio_of[name] = [median_ratio(clocks[first][clock], clocks[second][clock]) for clock in ("wall", "cpu")]
    return {"title": title, "remark": remark, "seconds": spreads(clocks), "ratios": ratio_of}


def text(table: Dict[str, Any]) -> str:
    """Formats a table of `compare` as text, in milliseconds."""
    head = f"{'milliseconds':<44}{'median':>9}{'quartiles':>19}{'min':>9}{'CPU':>9}{'ratio':>8}{'CPU':>7}"
    lines = [table["title"], head]
    for side, clocks in table["seconds"].items():
        line = f"{side:<44}{quartiles(clocks['wall'])}{1e3 * clocks['cpu']['median']:>9.3f}"
        ratio = table["ratios"].get(f"{side} / {BASE}")
        lines.append(line + ("{:>8.3f}{:>7.3f}".format(*ratio) if ratio else ""))
    for name, ratio in table["ratios"].items():
        if not name.endswith(f" / {BASE}"):
            lines.append("{:<90}{:>8.3f}{:>7.3f}".format(name, *ratio))
    return "\n".join([*lines, f"({table['remark']})"])


def quartiles(seconds: Dict[str, float]) -> str:
    """Returns the median, quartiles and minimum of a `spread` in milliseconds, as columns."""
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    return "{median:>9.3f}{lower_quartile:>10.3f}{upper_quartile:>9.3f}{min:>9.3f}".format(**milliseconds)
