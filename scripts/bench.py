"""Measures mindlora's speed, memory, bytes and losses, each against a baseline.

python scripts/bench.py --list                          what can be measured
python scripts/bench.py NAME --help                     how it is measured, and the options
python scripts/bench.py NAME --json figures.json        measures it, prints tables, and writes the figures to a file
python scripts/bench.py NAME --quick                    small shapes and few rounds, to check that it runs
"""

import argparse
import ast
import importlib.util
import sys
from typing import List

from bench import common

# Each is a module of scripts/bench. It has `add_options(parser)`, `run(args)`, which prints tables and returns figures,
# and, if it measures in child processes, `child(args, words)`, which these processes run.
BENCHMARKS = (
    "ops",
    "train",
    "pynative",
    "qlora",
    "preference",
    "loss",
    "exchange",
    "serving",
    "io",
    "scale",
    "start",
    "sweep",
    "rl",
    "rl_several",
)


def main() -> None:
    """Runs the benchmark that the command line names, or lists all benchmarks."""
    words = sys.argv[1:]
    if words and words[0] in BENCHMARKS:
        run(words[0], words[1:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", nargs="?", choices=BENCHMARKS, help=", ".join(BENCHMARKS))
    parser.add_argument("--list", action="store_true", help="show what each of them measures")
    if not parser.parse_args().list:
        parser.error("name a benchmark; --list shows them")
    for name in BENCHMARKS:
        print(f"{name:<14}{subject(name)}")


def subject(name: str) -> str:
    """Returns the first line of a benchmark's docstring, without importing it."""
    with open(importlib.util.find_spec(f"bench.{name}").origin, encoding="utf-8") as file:
        return ast.get_docstring(ast.parse(file.read())).splitlines()[0]


def run(name: str, words: List[str]) -> None:
    """Runs a benchmark with the rest of the command line, and writes its figures to the --json file."""
    benchmark = importlib.import_module(f"bench.{name}")
    parser = common.parser(benchmark.__doc__, prog=f"bench.py {name}")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds, to check that it runs")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    benchmark.add_options(parser)
    args = parser.parse_args(words)
    common.set_defaults(args)
    child = vars(args).pop("child")
    if child is not None:
        benchmark.child(args, child)
        return
    machine = common.machine()
    print(f"{common.machine_line(machine)}\n", flush=True)
    figures = benchmark.run(args)
    common.write_json(args.json, {"benchmark": name, "machine": machine, "arguments": vars(args), **figures})


if __name__ == "__main__":
    main()
