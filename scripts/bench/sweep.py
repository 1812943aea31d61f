"""Several adapters in one run on a CPU, against as many runs: time, memory, and the source of the gain.

K adapters with different learning rates train on all linear cells of one model, with one row each per step. Both sides
are mindlora-run as a user calls it, in separate processes; the single runs come one after another. "Load" is the time
from the command to the first step, "compile" the extra time of the first step over a later one, "steps" the rest. The
memory of K runs is the sum of their peaks, which they would need to run at the same time.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from typing import Any, Dict, List

import yaml

from bench.scale import GIB, Size, finished, run_yaml, timings, write_rows, write_weights

MODEL = Size(256, 12, 4, 4, 688, 4000, 64)
QUICK_MODEL = Size(64, 2, 4, 2, 96, 128, 16)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--counts", nargs="+", type=int, help="numbers of adapters (default: 1 2 4 8)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run, 2 or more (default: 20)")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints a line for each side and returns the figures."""
    size = QUICK_MODEL if args.quick else MODEL
    counts = args.counts or ([1, 2] if args.quick else [1, 2, 4, 8])
    figures: Dict[str, Any] = {}
    print(f"{'':<22}{'wall s':>8}{'load s':>8}{'compile s':>11}{'steps s':>9}{'peak GiB':>10}")
    with tempfile.TemporaryDirectory() as folder:
        write_weights(os.path.join(folder, "base"), size)
        write_rows(folder, size, args.steps)
        alone: List[Dict[str, float]] = []
        for count in sorted(counts):
            while len(alone) < count:
                alone.append(measure(size, folder, [rate(len(alone))]))
            runs = alone[:count]
            total = {key: sum(one[key] for one in runs) for key in runs[0]}
            together = measure(size, folder, [rate(number) for number in range(count)], True)
            figures[str(count)] = {"one run": together, "runs": total}
            print(line(f"{count} in one run", together))
            print(line(f"{count} run{'s' * (count > 1)}", total))
            shares = together["wall"] / total["wall"], together["peak"] / total["peak"]
            print(f"{'':<22}{shares[0]:.2f} of the time, {shares[1]:.2f} of the memory", flush=True)
    return {"model": size._asdict(), "steps": args.steps, "counts": figures}


def rate(number: int) -> float:
    """Returns the learning rate of an adapter."""
    return 1e-4 * (number + 1)


def line(name: str, figures: Dict[str, float]) -> str:
    """Formats one side's figures as a line of the table."""
    text = f"{name:<22}{figures['wall']:>8.1f}{figures['load']:>8.1f}{figures['compile']:>11.1f}"
    return f"{text}{figures['steps']:>9.1f}{figures['peak'] / GIB:>10.2f}"


def measure(size: Size, folder: str, rates: List[float], together: bool = False) -> Dict[str, float]:
    """Returns the seconds and bytes of a run with an adapter for each rate; without ``adapters`` if not together."""
    config = run_yaml(size, os.path.join(folder, "base"), os.path.join(folder, "rows.mindrecord"))
    config["lr_schedule"]["learning_rate"] = rates[0]
    if together:
        adapters = [{"name": f"a{number}", "learning_rate": rate} for number, rate in enumerate(rates)]
        config["model"]["model_config"]["pet_config"]["adapters"] = adapters
    path, output = os.path.join(folder, "run.yaml"), os.path.join(folder, "output")
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    command = [sys.executable, "-m", "mindlora.training.launch.launcher", "--config", path, "--output_dir", output]
    began, peak = finished(command, folder)
    wall = time.time() - began
    with open(os.path.join(output, *(["a0"] if together else []), "metrics.jsonl"), encoding="utf-8") as file:
        records = [record for record in map(json.loads, file) if "loss" in record]
    times = [record["time"] for record in records]
    first = records[0]["tokens"] / records[0]["tokens_per_second"]
    parts = timings(began, times[0] - first, times)
    return {
        "wall": wall,
        "load": parts["load"],
        "compile": parts["compile"],
        "steps": times[-1] - times[0] + parts["step"],
        "peak": peak,
    }
