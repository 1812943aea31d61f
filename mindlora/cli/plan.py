"""mindlora plan: what a run will take, before it begins."""

import argparse
from typing import TYPE_CHECKING

from mindlora.cli.verb import Verb, add_command

if TYPE_CHECKING:
    from mindlora.plan.report import PlanReport


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{parser.description} The exit code is 1 if the run does not fit --memory."
    parser.add_argument(
        "yaml",
        metavar="YAML",
        help="complete MindFormers YAML; --a.b.c VALUE and the flags of mindlora-run override its keys, for instance "
        "--train_dataset_dir PATH",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of a device, such as 32GB or 29.8GiB: what to change so that it fits"
    )
    parser.add_argument(
        "--devices", default="1,2,4,8", metavar="N,N", help="numbers of devices to plan for (default: 1,2,4,8)"
    )
    parser.set_defaults(overrides=[])
    add_command(parser, plan)


def plan(arguments: argparse.Namespace) -> "PlanReport":
    """Runs mindlora plan."""
    from mindlora.errors import ConfigError
    from mindlora.plan.make import make_plan
    from mindlora.plan.units import parse_memory

    memory = None if arguments.memory is None else parse_memory(arguments.memory)
    try:
        devices = [int(count) for count in arguments.devices.split(",")]
    except ValueError as error:
        raise ConfigError(f"--devices is {arguments.devices!r}: it must be numbers such as 1,2,4,8.") from error
    return make_plan(arguments.yaml, arguments.overrides, memory, devices)


VERBS = (
    Verb("plan", "Say what a run will take: memory, steps, files, and what to change so that it fits.", _plan_options),
)
