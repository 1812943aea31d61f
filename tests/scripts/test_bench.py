"""scripts/bench.py: what it lists, and what all benchmarks share."""

import argparse
import ast
import importlib.util
import os
import pkgutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, "scripts"))
from bench import common  # noqa: E402

BENCH = os.path.join(ROOT, "scripts", "bench.py")


def bench(*words):
    return subprocess.run([sys.executable, BENCH, *words], capture_output=True, text=True, check=False)


def functions(name):
    with open(importlib.util.find_spec(f"bench.{name}").origin, encoding="utf-8") as file:
        return {node.name for node in ast.parse(file.read()).body if isinstance(node, ast.FunctionDef)}


def test_the_list_shows_what_each_benchmark_measures():
    lines = bench("--list").stdout.splitlines()
    names = [line.split()[0] for line in lines]
    assert "ops" in names and "serving" in names
    for name, line in zip(names, lines):
        assert len(line) <= 120 and line.endswith("."), line
        assert {"add_options", "run"} <= functions(name), name
    modules = sorted(module.name for module in pkgutil.iter_modules([os.path.join(ROOT, "scripts", "bench")]))
    assert [name for name in modules if {"add_options", "run"} <= functions(name)] == sorted(names)


def test_a_benchmark_that_is_not_there_is_refused_with_the_names_of_all():
    assert "name a benchmark; --list shows them" in bench().stderr
    refused = bench("op")
    assert refused.returncode == 2 and "'op'" in refused.stderr and "'ops'" in refused.stderr


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "nowhere/figures.json"):
        with pytest.raises(SystemExit):
            common.parser("").parse_args(["--json", str(path)])
        assert f"{path} cannot be written: name a new file in a folder that is there" in capsys.readouterr().err
    written = str(tmp_path / "figures.json")
    assert common.parser("").parse_args(["--json", written]).json == written


@pytest.mark.parametrize(
    "words, expected", [([], (40, [1, 2])), (["--quick"], (5, [1])), (["--quick", "--rounds", "7"], (7, [1]))]
)
def test_quick_changes_the_defaults_alone(words, expected):
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    common.add_number(parser, "--rounds", 40, 5, "rounds")
    common.add_number(parser, "--seeds", [1, 2], [1], "seeds", nargs="+")
    args = parser.parse_args(words)
    common.set_defaults(args)
    assert (args.rounds, args.seeds) == expected


def test_sides_take_turns_in_every_order_and_what_warms_up_does_not_count():
    calls = []
    sides = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    results = common.take_turns(sides, rounds=6, warm_up=1)
    orders = {"".join(calls[start : start + 3]) for start in range(0, len(calls), 3)}
    assert len(calls) == 21 and orders == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert all(len(values) == 6 and min(values) > 3 for values in results.values())


def test_a_ratio_is_the_median_of_the_ratios_within_a_round():
    assert common.median_ratio([1.0, 9.0, 4.0], [2.0, 3.0, 2.0]) == 2.0
