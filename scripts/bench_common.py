"""What the benchmarks share: sides that take turns, the figures of what was timed, the machine, and the JSON file.

Import it before MindSpore: it sets what MindSpore reads when it is imported.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

# As mindlora-run sets it: threads that spin between kernels disturb the next side.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("GLOG_v", "3")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

BASE, AGAIN = "base", "base, again"
WARM_UP = 4
# Instruction set -> the flags of /proc/cpuinfo that the CPU operators require for it.
INSTRUCTION_SETS = {
    "AVX-512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"},
    "AVX2": {"avx2", "fma", "f16c"},
}


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser that shows a benchmark's docstring and takes --json."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="FILE", type=new_file, help="also write the figures to this file")
    return made


def new_file(path: str) -> str:
    """Returns the absolute path of a file that can be written, so that no figures are lost at the end."""
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


def machine(*packages: str) -> Dict[str, Any]:
    """Returns what the figures depend on: processor, instruction set, cores, load and the versions of `packages`."""
    fields = {}
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            pairs = (line.partition(":") for line in file if ":" in line)
            # setdefault: the first processor represents all.
            for name, _, value in pairs:
                fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    best = next((name for name, wanted in INSTRUCTION_SETS.items() if wanted <= flags), "no AVX2")
    return {
        "cpu": fields.get("model name", "unknown processor"),
        "instruction_set": f"{best}, limited to AVX2" if is_limited() else best,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "load_average": round(os.getloadavg()[0], 1),
    }


def is_limited() -> bool:
    """Returns whether MindSpore's products are limited to AVX2, as ONEDNN_MAX_CPU_ISA says."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2"


def version(package: str) -> str:
    """Returns the version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine_line(found: Dict[str, Any]) -> str:
    """Returns the result of `machine` as one line."""
    own = ("cpu", "instruction_set", "cores", "load_average")
    versions = ", ".join(f"{name} {value}" for name, value in found.items() if name not in own)
    return "{cpu} ({instruction_set}), {cores} cores, load {load_average}".format(**found) + f"; {versions}"


def spread(seconds: Sequence[float]) -> Dict[str, float]:
    """Returns median, quartiles, least and greatest of a list."""
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return {
        "median": median,
        "lower_quartile": low,
        "upper_quartile": high,
        "min": min(seconds),
        "max": max(seconds),
        "count": len(seconds),
    }


def take_turns(
    sides: Dict[str, Callable[[], Any]], rounds: int, warm_up: int = WARM_UP
) -> Dict[str, List[Tuple[float, ...]]]:
    """Returns [wall, cpu] for each side: the seconds of its rounds on the clock, and those that the process computed.

    Every order of the sides occurs, so that no side always follows the same other one.
    """
    times: Dict[str, List[Tuple[float, float]]] = {side: [] for side in sides}
    orders = list(itertools.permutations(sides))
    random.Random(0).shuffle(orders)
    for i in range(warm_up + rounds):
        for side in orders[i % len(orders)]:
            start, computed = time.perf_counter(), time.process_time()
            wait(sides[side]())
            times[side].append((time.perf_counter() - start, time.process_time() - computed))
    return {side: list(zip(*pairs[warm_up:])) for side, pairs in times.items()}


def wait(result: Any) -> None:
    """Waits until what a network returned has been computed."""
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
    """Returns a table of sides that took turns: seconds on the clock and computed, and their ratios.

    A ratio is the median of the ratios within a round, since what else runs on the machine disturbs both sides of a
    round alike. Each side is compared with BASE, where there is one; `ratios` names further pairs.
    """
    clocks = take_turns({side: lambda call=call: call(*inputs) for side, call in sides.items()}, rounds)
    pairs = dict(ratios or {})
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


def text(table: Dict[str, Any]) -> str:
    """Returns a table of `compare` as text, in milliseconds."""
    head = f"{'milliseconds':<44}{'median':>9}{'quartiles':>19}{'min':>9}{'CPU':>9}{'ratio':>8}{'CPU':>7}"
    lines = [table["title"], head]
    for side, clocks in table["seconds"].items():
        wall, cpu = ({name: 1e3 * value for name, value in clocks[clock].items()} for clock in ("wall", "cpu"))
        ratio = table["ratios"].get(f"{side} / {BASE}")
        lines.append(
            f"{side:<44}{wall['median']:>9.3f}{wall['lower_quartile']:>10.3f}{wall['upper_quartile']:>9.3f}"
            f"{wall['min']:>9.3f}{cpu['median']:>9.3f}" + ("{:>8.3f}{:>7.3f}".format(*ratio) if ratio else "")
        )
    lines += [
        "{:<90}{:>8.3f}{:>7.3f}".format(name, *ratio)
        for name, ratio in table["ratios"].items()
        if not name.endswith(f" / {BASE}")
    ]
    return "\n".join(lines + [f"({table['remark']})"])
