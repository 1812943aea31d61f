"""Held-out loss of the quickstart's fine-tuning on its base in 4 bits against that on the base in float.

Data, base, YAML and launcher are those of the quickstart, which keeps the base that it trained. For each seed both
sides train through mindlora-run; they are compared by the loss on the 48 held-out dialogues. A seed takes a few
minutes.
"""

import argparse
import os
import re
import shutil
import statistics
import sys
from typing import Any, Dict, List, Sequence

import quickstart
import yaml

GOAL = 1.03
QLORA = ("--model.model_config.pet_config.pet_type", "qlora")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    output = os.path.join(quickstart.ROOT, "output", "quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--output", default=output, help="where the quickstart has written its base")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints a row for each seed and returns the figures."""
    paths = quickstart.Paths(os.path.abspath(args.output), args.quick)
    os.makedirs(paths.output, exist_ok=True)
    os.chdir(paths.output)
    quickstart.prepare_data(paths)
    if not os.path.exists(paths.base):
        quickstart.train_base(paths, args.quick)
    quantized = os.path.join(paths.output, "base-nf4.safetensors")
    quickstart.run(
        [sys.executable, "-m", "mindlora.cli", "quantize-base", paths.base, quantized, "--overwrite"], "quantize.log"
    )
    sides = {"lora": ("--load_checkpoint", paths.base), "qlora": ("--load_checkpoint", quantized, *QLORA)}
    config = with_held_out(paths)
    rows: List[Dict[str, float]] = []
    print(f"held-out loss, nats per token\n\n{'seed':>4}  {'lora':>7}  {'qlora':>7}  qlora of lora", flush=True)
    for seed in args.seeds:
        losses = {side: fine_tuned(paths, config, side, seed, flags, args.quick) for side, flags in sides.items()}
        ratio = losses["qlora"] / losses["lora"]
        rows.append({"seed": seed, **losses, "ratio": ratio})
        print(f"{seed:>4}  {losses['lora']:7.3f}  {losses['qlora']:7.3f}  {ratio:6.3f}x", flush=True)
    median = statistics.median(row["ratio"] for row in rows)
    print(f"\nmedian {median:.3f}x, goal at most {GOAL}x for each")
    return {"rows": rows, "median": median, "goal": GOAL}


def with_held_out(paths: quickstart.Paths) -> str:
    """Writes the quickstart's YAML with a held-out loss at the end of training, and returns its path."""
    with open(quickstart.LORA_YAML, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    # So many steps: once, at the end.
    config["callbacks"] = [
        {"type": "MFLossMonitor"},
        {"type": "HeldOutLoss", "dataset_dir": paths.held_out, "every_steps": 10**6, "batch_size": 16},
    ]
    path = os.path.join(paths.output, "held_out.yaml")
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file, sort_keys=False)
    return path


def fine_tuned(paths: quickstart.Paths, config: str, side: str, seed: int, flags: Sequence[str], quick: bool) -> float:
    """Fine-tunes one side and returns its held-out loss."""
    output = os.path.join(paths.output, side)
    log = f"{side}-{seed}.log"
    shutil.rmtree(output, ignore_errors=True)
    quickstart.launch(
        config,
        output,
        log,
        "--train_dataset_dir",
        paths.dialogues,
        "--seed",
        str(seed),
        *flags,
        *(["--runner_config.epochs", "1"] if quick else []),
    )
    with open(log, encoding="utf-8") as file:
        return float(re.findall(r"held_out_loss ([\d.]+)", file.read())[-1])
