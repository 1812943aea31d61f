"""A step of learning from rewards against TRL's GRPOTrainer: time, the share of sampling, and memory.

Both train LoRA of rank 16 on all linear cells of the same random Llama on a CPU in float32: 64 answers of 32 tokens to
8 prompts, rated by a function that takes no time, and one gradient step. mindlora rl runs as a user calls it; TRL
samples with transformers' generate, with the Python that MINDLORA_PEERS_PYTHON names. Each side runs in its own
process, in turns; the first step, which compiles, does not count. "Peak" is the process's peak resident memory. "TRL +
a copy" holds the base twice, as when another engine (vLLM, with its own base) samples for TRL.
    python scripts/bench.py rl --json figures.json
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from typing import Any, Dict, List

import yaml

from bench import ROOT
from bench.common import add_number
from bench.scale import GIB, PYTHON, RANK, Size, finished, write_weights

PROMPTS, ANSWERS, NEW = 8, 8, 32
# TRL has batches of 16 rows, each as long as the longest prompt plus answer in the batch.
ROW_TOKENS = 16 * 40
SIZES = {"60M": Size(512, 12, 8, 4, 1376, 16000, 64), "0.5B": Size(1280, 24, 20, 20, 3456, 32000, 64)}
QUICK_SIZES = {"quick": Size(64, 2, 4, 2, 96, 512, 64)}
# Shares of TRL's time, and of TRL's peak with a second copy.
GOALS = {"time": 0.5, "peak": 0.6}
SIDES = ("mindlora", "TRL", "TRL + a copy")
REWARDS = "def words(prompts, completions, **columns):\n    return [float(len(text.split())) for text in completions]\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="which of them (default: all)")
    add_number(parser, "--rounds", 3, 1, "processes of each side")
    add_number(parser, "--steps", 5, 3, "steps of each process")
    add_number(parser, "--seq-length", 40, 40, "tokens of mindlora's rows, of which a batch has about 640")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints a table for each size and returns the figures."""
    if not os.environ.get(PYTHON):
        raise SystemExit(
            f"{PYTHON} names no Python with TRL: make the environment by bash scripts/test.sh tests/peers."
        )
    sizes = QUICK_SIZES if args.quick else {name: SIZES[name] for name in args.sizes or SIZES}
    figures: Dict[str, Any] = {}
    print(f"{'':<20}{'step s':>9}{'sampling s':>12}{'peak GiB':>10}")
    for name, size in sizes.items():
        found: Dict[str, List[Dict[str, float]]] = {side: [] for side in SIDES}
        with tempfile.TemporaryDirectory() as folder:
            prepare(folder, size)
            for _ in range(args.rounds):
                found["mindlora"].append(measure_mindlora(folder, args.steps, args.seq_length))
                found["TRL"].append(measure_trl(folder, args.steps))
                found["TRL + a copy"].append(measure_trl(folder, args.steps, copies=2))
        figures[name] = {side: medians(measured) for side, measured in found.items()}
        for side, measured in figures[name].items():
            text = f"{name + ', ' + side:<20}{measured['step']:>9.2f}{measured['sampling']:>12.2f}"
            print(f"{text}{measured['peak'] / GIB:>10.2f}", flush=True)
        ours, theirs, copied = (figures[name][side] for side in SIDES)
        time, peak, peak_of_two = (
            ours["step"] / theirs["step"],
            ours["peak"] / theirs["peak"],
            ours["peak"] / copied["peak"],
        )
        print(f"of TRL's: time {time:.2f} (goal {GOALS['time']}), peak {peak:.2f}", flush=True)
        print(f"of TRL's with a second copy: peak {peak_of_two:.2f} (goal {GOALS['peak']})\n", flush=True)
    return {
        "seq_length": args.seq_length,
        "sizes": {name: size._asdict() for name, size in sizes.items()},
        "rank": RANK,
        "runs": figures,
    }


def medians(measured: List[Dict[str, float]]) -> Dict[str, float]:
    """Returns the median of each figure over a side's processes."""
    return {name: statistics.median(each[name] for each in measured) for name in measured[0]}


def prepare(folder: str, size: Size) -> None:
    """Writes the base, the prompts and the reward function."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from bench.serving_model import tokenizer

    base = os.path.join(folder, "base")
    write_weights(base, size)
    tokenizer(size.vocabulary).save_pretrained(base)
    with open(os.path.join(folder, "prompts.jsonl"), "w", encoding="utf-8") as file:
        for number in range(PROMPTS):
            print(json.dumps({"prompt": f"w{number + 3} w4 w5 w6"}), file=file)
    with open(os.path.join(folder, "rewards.py"), "w", encoding="utf-8") as file:
        file.write(REWARDS)


def write_yaml(folder: str, steps: int, length: int) -> str:
    """Writes mindlora rl's YAML with rows of ``length`` tokens, and returns its path."""
    path = os.path.join(folder, "run.yaml")
    writing = [
        "configs",
        "--from",
        "base",
        "--prompts",
        "prompts.jsonl",
        "--rewards",
        "rewards.py:words",
        "--overwrite",
    ]
    sizes = ["--device", "cpu", "--seq-length", str(length), "--output", path]
    finished([sys.executable, "-m", "mindlora.cli", *writing, *sizes], folder)
    with open(path, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    config["runner_config"].update(epochs=steps, batch_size=max(1, ROW_TOKENS // length))
    config["model"]["model_config"].update(param_init_type="float32", embedding_init_type="float32")
    config["runner_wrapper"]["rl"].update(num_generations=ANSWERS, prompts_per_step=PROMPTS, max_completion_length=NEW)
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    return path


def measure_mindlora(folder: str, steps: int, length: int) -> Dict[str, float]:
    """Returns the seconds and bytes of mindlora rl with rows of ``length`` tokens."""
    path = write_yaml(folder, steps, length)
    output = tempfile.mkdtemp(dir=folder)
    done = finished([sys.executable, "-m", "mindlora.cli", "rl", path, "--output_dir", output], folder)
    with open(os.path.join(output, "metrics.jsonl"), encoding="utf-8") as file:
        records = [record for record in map(json.loads, file) if "loss" in record][1:]
    # TRL's answers do not end early; hardly any of mindlora's does.
    tokens = min(record["tokens"] for record in records) / (PROMPTS * ANSWERS * NEW)
    if tokens < 0.9:
        raise SystemExit(f"mindlora's answers had {tokens:.0%} of the tokens of TRL's.")
    return {
        "step": statistics.median(record["seconds_sampling"] + record["seconds_training"] for record in records),
        "sampling": statistics.median(record["seconds_sampling"] for record in records),
        "peak": done.peak,
    }


def measure_trl(folder: str, steps: int, copies: int = 1) -> Dict[str, float]:
    """Returns the seconds and bytes of TRL's run, which holds the base ``copies`` times."""
    times = os.path.join(folder, "times.json")
    script = os.path.join(ROOT, "scripts", "bench", "rl_trl.py")
    arguments = ["base", "prompts.jsonl", times, *map(str, (RANK, steps, copies))]
    done = finished([os.environ[PYTHON], script, *arguments], folder)
    with open(times, encoding="utf-8") as file:
        found = json.load(file)
    return {name: statistics.median(found[name][1:]) for name in ("step", "sampling")} | {"peak": done.peak}
