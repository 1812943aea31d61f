"""Several adapters that learn from rewards in one run on a CPU, against as many runs: time and memory.

K adapters with different learning rates learn as in bench.py rl, on the same random Llama. Both sides are mindlora rl
as a user calls it, in separate processes; the single runs come one after another. "Step" is the median time of an
optimizer step for all adapters; for single runs, the sum of their medians. The memory of K runs is the sum of their
peaks, which they would need to run at the same time.
    python scripts/bench.py rl_several --json figures.json
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from typing import Any, Dict, List

import yaml

from bench.common import add_number
from bench.rl import QUICK_SIZES, SIZES, prepare, write_yaml
from bench.scale import GIB, finished


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--size", choices=list(SIZES), help="of the model (default: 60M)")
    parser.add_argument("--counts", nargs="+", type=int, help="numbers of adapters (default: 2 4)")
    add_number(parser, "--steps", 5, 3, "steps of each process")
    add_number(parser, "--seq-length", 40, 40, "tokens of the rows, of which a batch has about 640")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints a line for each side and returns the figures."""
    size = QUICK_SIZES["quick"] if args.quick else SIZES[args.size or "60M"]
    counts = args.counts or ([2] if args.quick else [2, 4])
    figures: Dict[str, Any] = {}
    print(f"{'':<16}{'wall s':>9}{'step s':>9}{'sampling s':>12}{'peak GiB':>10}")
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder, size)
        path = write_yaml(folder, args.steps, args.seq_length)
        alone: List[Dict[str, float]] = []
        for count in sorted(counts):
            while len(alone) < count:
                alone.append(measure(folder, path, [rate(len(alone))]))
            total = {key: sum(each[key] for each in alone[:count]) for key in alone[0]}
            together = measure(folder, path, [rate(number) for number in range(count)])
            figures[str(count)] = {"one run": together, "runs": total}
            print(line(f"{count} in one run", together))
            print(line(f"{count} runs", total))
            shares = {key: together[key] / total[key] for key in ("wall", "step", "peak")}
            print(
                f"{'':<16}{shares['wall']:.2f} of the time, {shares['step']:.2f} of that of a step, "
                f"{shares['peak']:.2f} of the memory",
                flush=True,
            )
    return {"model": size._asdict(), "steps": args.steps, "seq_length": args.seq_length, "counts": figures}


def rate(number: int) -> float:
    """Returns the learning rate of an adapter."""
    return 1e-4 * (number + 1)


def line(name: str, figures: Dict[str, float]) -> str:
    """Formats one side's figures as a line of the table."""
    text = f"{name:<16}{figures['wall']:>9.1f}{figures['step']:>9.2f}{figures['sampling']:>12.2f}"
    return f"{text}{figures['peak'] / GIB:>10.2f}"


def measure(folder: str, path: str, rates: List[float]) -> Dict[str, float]:
    """Returns the seconds and bytes of a run with an adapter for each rate; without ``adapters`` for a single rate."""
    with open(path, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    config["lr_schedule"]["learning_rate"] = rates[0]
    if len(rates) > 1:
        adapters = [{"name": f"a{number}", "learning_rate": rate} for number, rate in enumerate(rates)]
        config["model"]["model_config"]["pet_config"]["adapters"] = adapters
    output = tempfile.mkdtemp(dir=folder)
    own = os.path.join(output, "run.yaml")
    with open(own, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    done = finished([sys.executable, "-m", "mindlora.cli", "rl", own, "--output_dir", output], folder)
    records = records_of(os.path.join(output, "a0") if len(rates) > 1 else output)
    return {
        "wall": done.ended - done.began,
        "step": statistics.median(record["seconds_sampling"] + record["seconds_training"] for record in records),
        "sampling": statistics.median(record["seconds_sampling"] for record in records),
        "peak": done.peak,
    }


def records_of(output: str) -> List[Dict[str, Any]]:
    """Returns a run's records of its steps, except the first, which compiles."""
    with open(os.path.join(output, "metrics.jsonl"), encoding="utf-8") as file:
        return [record for record in map(json.loads, file) if "loss" in record][1:]
