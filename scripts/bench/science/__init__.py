"""Published claims about LoRA, tried on stories260K: a Llama of 260 thousand pretrained parameters.

It learns Shakespeare's plays or E2E's descriptions of restaurants, sixty steps each time, with the product's
own cells and train step in float32 on a CPU. Losses are on held-out rows, in nats per token. The seeds,
the same for each side, draw A and the order of the rows; two of them search for a side's best rate among powers of two.
A difference is told apart if its 95 % interval over the seeds leaves out 0. The groups with "one-rate" in their
names try claims again with one low rate for all sides.
    python scripts/bench.py science rate --data FOLDER --json figures.json
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from typing import Any, Dict, List

from bench.common import add_number
from bench.science.claims import CLAIMS
from bench.science.claims.claim import PASS, Result, Setting
from bench.science.data import LENGTH, read_e2e, read_plays
from bench.science.rates import MOVES, STUDENT
from bench.science.training import write_base

# Else transformers advises installing PyTorch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    folder = os.environ.get("MINDLORA_TEST_DATA")
    data = {"default": folder} if folder else {"required": True}
    files = "stories260K.bin, tok512.bin, tinyshakespeare.txt and e2e_valid.txt"
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"{', '.join(CLAIMS)} (default: all)")
    parser.add_argument("--data", **data, help=f"folder with {files} (default: $MINDLORA_TEST_DATA)")
    add_number(parser, "--steps", 60, 2, "steps of each training")
    add_number(parser, "--seeds", [1, 2, 3, 4, 5], [1, 2], "seeds of each side", nargs="+")


def run(args: argparse.Namespace) -> Dict[str, Any]:
    """Prints a table and a verdict for each group and returns the figures."""
    unknown = sorted(set(args.groups) - set(CLAIMS))
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}: no such group. There are: {', '.join(CLAIMS)}")
    if len(args.seeds) > max(STUDENT):
        raise SystemExit(f"--seeds names {len(args.seeds)} seeds: name at most {max(STUDENT)}.")
    data = os.path.abspath(args.data)
    figures: Dict[str, Any] = {}
    screen = sys.stdout
    with tempfile.TemporaryDirectory() as folder:
        # MindFormers logs to stdout and writes output/ in the working folder.
        os.chdir(folder)
        with open("log.txt", "w", encoding="utf-8") as log, contextlib.redirect_stdout(log):
            for name in args.groups or CLAIMS:
                start = time.perf_counter()
                result = CLAIMS[name](setting_of(args, data, folder))
                seconds = time.perf_counter() - start
                print(f"{text(name, result)}\n({seconds:.0f} s)\n", file=screen, flush=True)
                figures[name] = {**result._asdict(), "seconds": seconds}
    passed = sum(found["verdict"] == PASS for found in figures.values())
    print(f"{passed} of {len(figures)} claims passed")
    return {"groups": figures}


def setting_of(args: argparse.Namespace, data: str, folder: str) -> Setting:
    """Returns what all groups share."""
    import mindspore as ms

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    return Setting(
        base=write_base(data, folder),
        plays=read_plays(data, LENGTH),
        e2e=read_e2e(data, LENGTH),
        length=LENGTH,
        steps=args.steps,
        seeds=args.seeds,
        moves=0 if args.quick else MOVES,
    )


def text(name: str, result: Result) -> str:
    """Returns a claim, its table and its verdict as text."""
    return "\n".join(
        [f"{name}: {result.claim} ({result.source})", *table(result.rows), f"{result.verdict}: {result.reason}"]
    )


def table(rows: List[Dict[str, Any]]) -> List[str]:
    """Returns the lines of a table whose columns are the keys of the rows."""
    cells = [list(rows[0]), *([shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for first, *others in cells:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:]))
        lines.append("  ".join([first.ljust(widths[0]), *numbers]))
    return lines


def shown(value: Any) -> str:
    """Returns a value of a table as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
