"""mindlora sweep: one run that tries several learning rates, ranks, alphas and seeds, and names the best."""

import argparse
import dataclasses
import itertools
import json
import os
from typing import Any, Dict, List, Tuple

import yaml

from mindlora.cli.verb import Verb, add_command
from mindlora.core import atomic
from mindlora.core.errors import ConfigError
from mindlora.core.overrides import read_value
from mindlora.core.yaml_file import PET, read_merged, read_yaml, value_at
from mindlora.run.checks.pynative import is_pynative
from mindlora.training.trackers.rules import NAMES, tracker_names

# Option -> the key of an adapter that it sets, and the prefix in a folder's name if it varies.
_OPTIONS = {
    "lr": ("learning_rate", "lr"),
    "rank": ("lora_rank", "r"),
    "alpha": ("lora_alpha", "alpha"),
    "seed": ("seed", "seed"),
}
_COMPARISON, _PAGE = "comparison.json", "comparison.html"


@dataclasses.dataclass(frozen=True)
class SweepReport:
    """The result of mindlora sweep.

    Attributes:
        yaml (str): The YAML of the run, with all adapters.
        page (str): The page that compares the adapters; empty if the run has failed.
        adapters (tuple of str): Names of the adapters and their folders.
        best (str): The adapter with the smallest held-out loss, or the largest held-out reward; empty if none was
            measured.
        exit_code (int): Exit code of mindlora-run.
    """

    yaml: str
    page: str
    adapters: Tuple[str, ...]
    best: str
    exit_code: int

    def __str__(self) -> str:
        if self.exit_code:
            return f"{self.yaml}: the run has failed."
        folder = os.path.dirname(self.page)
        if not self.best:
            return (
                f"{self.page}: {', '.join(self.adapters)}. Add HeldOutLoss to callbacks, or held_out_prompts to rl, to "
                "know which is best."
            )
        return f"{self.page}\nbest: {self.best}, in {os.path.join(folder, self.best)}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Every combination becomes an adapter of pet_config.adapters; all train side by side over one base. "
        "--a.b.c VALUE and the flags of mindlora-run override keys of the YAML."
    )
    parser.add_argument("yaml", metavar="YAML", help="complete MindFormers YAML of a training run with pet_config")
    parser.add_argument("--lr", metavar="X,X", help="learning rates, in place of the schedule's")
    parser.add_argument("--rank", metavar="N,N", help="ranks, in place of lora_rank")
    parser.add_argument("--alpha", metavar="X,X", help="alphas, in place of lora_alpha")
    parser.add_argument("--seed", metavar="N,N", help="seeds of the initial values")
    parser.add_argument("--output_dir", metavar="FOLDER", help="output folder (default: that of the YAML)")
    trackers = f"trackers that show each adapter as a run: {', '.join(NAMES)}"
    parser.add_argument("--report-to", metavar="NAME,NAME", help=trackers)
    parser.add_argument("--resume", action="store_true", help="go on with the same sweep, which was stopped")
    parser.set_defaults(overrides=[])
    add_command(parser, _sweep)


def _sweep(arguments: argparse.Namespace) -> SweepReport:
    config = read_merged(arguments.yaml)
    adapters = _adapters(arguments)
    of_pynative = is_pynative(config)
    if of_pynative:
        # Its lora_config completes pet_config.
        pet_config = config["pet_config"] = config.get("pet_config") or {}
    else:
        config = read_yaml(arguments.yaml)
        pet_config = value_at(config, PET)
    if not isinstance(pet_config, dict):
        raise ConfigError(f"{arguments.yaml} has no pet_config, and a sweep tries settings of an adapter. Add it.")
    if pet_config.get("adapters"):
        raise ConfigError(f"{arguments.yaml} has pet_config.adapters already: start it with mindlora-run.")
    pet_config["adapters"] = adapters
    if arguments.report_to is not None:
        config["callbacks"] = _with_trackers(config.get("callbacks") or [], arguments.report_to)
    output = os.path.abspath(arguments.output_dir or config.get("output_dir") or "output")
    os.makedirs(output, exist_ok=True)
    path = os.path.join(output, "sweep.yaml")
    with atomic.replace_file(path) as written, open(written, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file, sort_keys=False)
    comparison = os.path.join(output, _COMPARISON)
    if os.path.exists(comparison):
        # An earlier run's results must not be mistaken for this one's.
        os.remove(comparison)
    from mindlora.training.launch import launcher

    flags = ["--output_dir", output]
    if of_pynative:
        # MindFormers' PyNative Trainer has no key for its output folder.
        os.environ["LOCAL_DEFAULT_PATH"] = output
        flags = ["--mode", "1"]
    resume = ["--resume"] if arguments.resume else []
    exit_code = launcher.main(["--config", path, *flags, *resume, *arguments.overrides])
    best = ""
    if not exit_code and os.path.exists(comparison):
        with open(comparison, encoding="utf-8") as file:
            best = next((found["best"] for found in json.load(file)), "")
    names = tuple(adapter["name"] for adapter in adapters)
    return SweepReport(path, os.path.join(output, _PAGE), names, best, exit_code)


def _with_trackers(callbacks: List[Dict[str, Any]], report_to: str) -> List[Dict[str, Any]]:
    """Returns callbacks with a Trackers that reports to the named trackers and is otherwise unchanged."""
    names = list(tracker_names(report_to.split(","), "--report-to"))
    tracking = next((callback for callback in callbacks if callback.get("type") == "Trackers"), {"type": "Trackers"})
    others = [callback for callback in callbacks if callback is not tracking]
    return [*others, {**tracking, "report_to": names}]


def _adapters(arguments: argparse.Namespace) -> List[Dict[str, Any]]:
    """Returns a node of pet_config.adapters for each combination of the options' values."""
    values = {option: getattr(arguments, option) for option in _OPTIONS}
    chosen = {option: text.split(",") for option, text in values.items() if text is not None}
    if not chosen:
        raise ConfigError("Nothing varies: name values of --lr, --rank, --alpha or --seed, such as --lr 1e-5,1e-4.")
    adapters = []
    for texts in itertools.product(*chosen.values()):
        pairs = list(zip(chosen, texts))
        name = "_".join(f"{_OPTIONS[option][1]}{text}" for option, text in pairs)
        adapters.append({"name": name, **{_OPTIONS[option][0]: read_value(text) for option, text in pairs}})
    return adapters


VERBS = (Verb("sweep", "Train adapters of several learning rates, ranks and alphas in one run.", _options),)
