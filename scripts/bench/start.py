"""From a command to its first token and first step: time and memory, against transformers and PEFT.

A folder of random bfloat16 weights is created and deleted. In each round, mindlora generate answers with one token,
from an empty folder of graphs and then again; mindlora-run trains LoRA of rank 16 on all linear cells for one step,
with base and products in bfloat16, and then again; transformers and PEFT do the same in bfloat16 with the Python that
MINDLORA_PEERS_PYTHON names. Each runs in its own process, and the sides take turns. "Wall" is the time from the command
to the end of generate, or of step 1; "CPU" the total CPU time of the process; "peak" its peak resident memory. Ratios
are medians of the ratios within a round, which other load on the machine disturbs little.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from typing import Any, Dict, List, NamedTuple

import yaml

from bench import ROOT
from bench.common import add_number, median_ratio, take_turns
from bench.scale import (
    GIB,
    PYTHON,
    QUICK_SIZES,
    RANK,
    SIZES,
    Finished,
    Size,
    finished,
    run_yaml,
    write_rows,
    write_tokenizer,
    write_weights,
)

# The side that ours is compared with, and the goals: shares of its time and of its peak.
ANSWERS, TRAINING = "transformers", "PEFT"
GOALS = {
    "generate, first start": (ANSWERS, 3.0, 1.25),
    "generate, second start": (ANSWERS, 2.0, 1.25),
    "mindlora-run, first start": (TRAINING, 1.6, None),
    "mindlora-run, second start": (TRAINING, 1.6, None),
}


class Start(NamedTuple):
    """The cost of one process: wall-clock seconds, CPU seconds and bytes."""

    wall: float
    cpu: float
    peak: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    sizes = [name for name, size in SIZES.items() if not size.quantized]
    parser.add_argument("--size", choices=sizes, default="1.1B", help="the model (default: %(default)s)")
    parser.add_argument("--only", choices=("generate", "train"), help="what is started (default: both)")
    add_number(parser, "--rounds", 3, 1, "how often each side starts")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints a table and returns the figures."""
    size = QUICK_SIZES["quick"] if args.quick else SIZES[args.size]
    with tempfile.TemporaryDirectory() as folder:
        base = os.path.join(folder, "base")
        write_weights(base, size)
        write_tokenizer(base, size)
        write_rows(folder, size, 1)
        sides = {"mindlora": lambda: ours(size, folder, args.only)}
        if os.environ.get(PYTHON):
            sides["peers"] = lambda: theirs(folder, args.only)
        rounds = take_turns(sides, args.rounds, warm_up=0)
    starts: Dict[str, List[Start]] = {}
    for found in (found for side in rounds.values() for found in side):
        for name, start in found.items():
            starts.setdefault(name, []).append(start)
    figures = {name: summary(name, starts) for name in starts}
    print(f"{'':<28}{'wall s':>8}{'CPU s':>8}{'peak GiB':>10}{'wall':>8}{'CPU':>8}{'peak':>8}  goals: wall, peak")
    for name, found in figures.items():
        print(line(name, found))
    return {"size": size._asdict(), "rank": RANK, "starts": figures}


def ours(size: Size, folder: str, only: str) -> Dict[str, Start]:
    """Starts each of mindlora's commands twice, from an empty folder of graphs."""
    graphs = tempfile.mkdtemp(dir=folder)
    found = {}
    for number in ("first", "second"):
        if only != "train":
            found[f"generate, {number} start"] = generated(size, folder, graphs)
    for number in ("first", "second"):
        if only != "generate":
            found[f"mindlora-run, {number} start"] = trained(size, folder, graphs)
    shutil.rmtree(graphs)
    return found


def theirs(folder: str, only: str) -> Dict[str, Start]:
    """Starts transformers and PEFT once each."""
    base, times = os.path.join(folder, "base"), os.path.join(folder, "times.json")
    found = {}
    if only != "train":
        found[ANSWERS] = whole(finished([os.environ[PYTHON], script("scale_transformers.py"), base], folder))
    if only != "generate":
        words = [base, os.path.join(folder, "rows.npy"), times, str(RANK), "1", "bfloat16"]
        done = finished([os.environ[PYTHON], script("scale_peft.py"), *words], folder)
        with open(times, encoding="utf-8") as file:
            _, end = json.load(file)
        found[TRAINING] = Start(end - done.began, done.cpu, done.peak)
    return found


def generated(size: Size, folder: str, graphs: str) -> Start:
    """Starts mindlora generate for one token."""
    words = ["--model", os.path.join(folder, "base"), "--prompt", "w3 w4", "--max-tokens", "1"]
    words += ["--seq-length", str(size.tokens)]
    return whole(finished([sys.executable, "-m", "mindlora.cli", "generate", *words], folder, graphs=graphs))


def trained(size: Size, folder: str, graphs: str) -> Start:
    """Starts mindlora-run for one step."""
    path, output = os.path.join(folder, "run.yaml"), tempfile.mkdtemp(dir=folder)
    config = run_yaml(size, os.path.join(folder, "base"), os.path.join(folder, "rows.mindrecord"))
    config["model"]["model_config"].update(param_init_type="bfloat16")
    config["model"]["model_config"]["pet_config"]["product_dtype"] = "bfloat16"
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    command = [sys.executable, "-m", "mindlora.training.launch.launcher", "--config", path, "--output_dir", output]
    done = finished(command, folder, graphs=graphs)
    with open(os.path.join(output, "metrics.jsonl"), encoding="utf-8") as file:
        (end,) = [record["time"] for record in map(json.loads, file) if "loss" in record]
    shutil.rmtree(output)
    return Start(end - done.began, done.cpu, done.peak)


def whole(done: Finished) -> Start:
    """Returns the figures of a process that ends with the timed action."""
    return Start(done.ended - done.began, done.cpu, done.peak)


def script(name: str) -> str:
    """Returns the path of a script in this folder."""
    return os.path.join(ROOT, "scripts", "bench", name)


def summary(name: str, starts: Dict[str, List[Start]]) -> Dict[str, Any]:
    """Returns a side's medians, and its ratios and goals against its peer if the peer was measured."""
    medians = {field: statistics.median(getattr(start, field) for start in starts[name]) for field in Start._fields}
    peer, time, peak = GOALS.get(name, ("", None, None))
    if peer not in starts:
        return medians
    ratios = {
        field: median_ratio(*([getattr(start, field) for start in starts[side]] for side in (name, peer)))
        for field in Start._fields
    }
    return {**medians, "peer": peer, "ratios": ratios, "goals": {"wall": time, "peak": peak}}


def line(name: str, found: Dict[str, Any]) -> str:
    """Formats one side's figures as a line of the table."""
    text = f"{name:<28}{found['wall']:>8.1f}{found['cpu']:>8.1f}{found['peak'] / GIB:>10.2f}"
    if "peer" not in found:
        return text
    ratios = "".join(f"{found['ratios'][field]:>7.2f}x" for field in Start._fields)
    goals = ", ".join(f"{goal}x" for goal in found["goals"].values() if goal is not None)
    return f"{text}{ratios}  {goals} of {found['peer']}"
