"""mindlora doctor, plan, report, runs, suggest, plugin-path, eva, reference: around a training run."""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import sys
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Dict, Tuple, Union

from mindlora.cli.engine import log_elsewhere, prepare_imports
from mindlora.cli.verb import Verb, add_command
from mindlora.training.launch.imports import import_mindformers

_EVA_ROWS, _EVA_BATCH = 256, 4


if TYPE_CHECKING:
    from mindlora.cli.doctor import DoctorReport
    from mindlora.run.plan.pynative import PynativePlan
    from mindlora.run.plan.report import PlanReport
    from mindlora.training.report.run_list import RunList

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent


def _doctor_options(parser):
    parser.description += " The exit code is 1 if the machine or a YAML has an error."
    parser.add_argument(
        "yamls", nargs="*", metavar="YAML", help="complete MindFormers YAMLs, checked without building the network"
    )
    parser.add_argument(
        "--adopt",
        metavar="REPORT",
        help="first keep what scripts/verify_npu.sh measured on an NPU, here or elsewhere: its report.json or folder",
    )
    parser.add_argument(
        "--ascend",
        action="store_true",
        help="compile each YAML without an error too, as the first and the last rank of its devices, and take two "
        "steps without launching a kernel: MindSpore's own Ascend backend does it in minutes, without an NPU and "
        "without data (x86-64 Linux, MindSpore's wheel with the Ascend plugin, g++)",
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="compile for N devices (default: those that the YAML is for)"
    )
    add_command(parser, _doctor)


def _doctor(arguments: argparse.Namespace) -> "DoctorReport":
    from mindlora.cli import doctor
    from mindlora.core.errors import ConfigError

    if arguments.devices is not None and not arguments.ascend:
        raise ConfigError("--devices says for how many devices a YAML is compiled: add --ascend.")
    with warnings.catch_warnings():
        # Other packages warn during MindFormers' import; mindlora's own warnings are in the report.
        warnings.simplefilter("ignore")
        if arguments.adopt is not None:
            doctor.adopt_choices(arguments.adopt)
        return doctor.examine(arguments.yamls, arguments.ascend, arguments.devices)


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description} The exit code is 1 if the run does not fit --memory, or fails in --verify."
    )
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
    parser.add_argument(
        "--verify",
        action="store_true",
        help="ask MindSpore's own planner too: its Ascend backend compiles the run on stand-ins for CANN, without an "
        "NPU and without data, in minutes (x86-64 Linux, MindSpore's wheel with the Ascend plugin, g++)",
    )
    parser.set_defaults(overrides=[])
    add_command(parser, _plan)


def _plan(arguments: argparse.Namespace) -> "Union[PlanReport, PynativePlan]":
    from mindlora.core.errors import ConfigError
    from mindlora.run.plan.report import make_plan
    from mindlora.run.plan.units import parse_memory

    memory = None if arguments.memory is None else parse_memory(arguments.memory)
    try:
        devices = [int(count) for count in arguments.devices.split(",")]
    except ValueError as error:
        raise ConfigError(f"--devices is {arguments.devices!r}: it must be numbers such as 1,2,4,8.") from error
    return make_plan(arguments.yaml, arguments.overrides, memory, devices, arguments.verify)


@dataclasses.dataclass(frozen=True)
class PageReport:
    """The page written by mindlora report, and the folders of the runs on it."""

    output: str
    runs: Tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.output}: {', '.join(self.runs)}"


@dataclasses.dataclass(frozen=True)
class LivePageReport:
    """The address of the page of mindlora report --live, and the folders of the runs on it."""

    url: str
    runs: Tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.url} showed {', '.join(self.runs)}"


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.description += " It may go on meanwhile, or have been killed."
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output folder of a training run, which holds its metrics.jsonl"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the page to write (default: report.html in RUN; comparison.html in the current folder for several runs)",
    )
    parser.add_argument(
        "--live", action="store_true", help="show it to browsers of this machine until Ctrl-C, with growing curves"
    )
    parser.add_argument("--port", type=int, metavar="N", help="port of --live; 0 for any that is free (default: 8001)")
    add_command(parser, _report)


def _report(arguments: argparse.Namespace) -> Union[PageReport, LivePageReport]:
    from mindlora.core.errors import ConfigError
    from mindlora.training.report import write_report

    if arguments.live:
        return _show_live(arguments)
    if arguments.port is not None:
        raise ConfigError("--port is for the live page: add --live.")
    one = os.path.join(arguments.runs[0], "report.html") if len(arguments.runs) == 1 else "comparison.html"
    output = arguments.output or one
    write_report(arguments.runs, output)
    return PageReport(output, tuple(arguments.runs))


def _show_live(arguments: argparse.Namespace) -> LivePageReport:
    from mindlora.core.errors import ConfigError
    from mindlora.training.report.live import LiveReport

    if arguments.output is not None:
        raise ConfigError("--live writes no file: leave out --output.")
    with LiveReport(arguments.runs, 8001 if arguments.port is None else arguments.port) as live:
        print(f"mindlora: open {live.url}; Ctrl-C ends it.", file=sys.stderr, flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            live.serve_forever()
        return LivePageReport(live.url, tuple(arguments.runs))


def _runs_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Each with its state, the last step and its loss, the lowest held-out loss, and when it last wrote: running, "
        "finished, stopped by a signal, failed, or silent, which has neither ended nor written for long."
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder in which training runs have their output folders")
    add_command(parser, _runs)


def _runs(arguments: argparse.Namespace) -> "RunList":
    from mindlora.training.report.run_list import list_runs

    return list_runs(arguments.folder)


def _suggest_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " From the gradients and singular values that the callback AdapterHealth recorded: cells whose update matters "
        "to the loss and has many directions get more, the others less. It prints YAML with a reason for each group."
    )
    parser.add_argument(
        "run_folder", metavar="RUN", help="output folder of a training run, which holds its metrics.jsonl"
    )
    parser.add_argument(
        "--budget", type=int, metavar="N", help="sum of the ranks of all cells (default: that of the run)"
    )
    add_command(parser, _suggest)


def _suggest(arguments: argparse.Namespace) -> Any:
    from mindlora.training.report.history import read_history
    from mindlora.training.report.rank_suggestion import suggest_ranks

    return suggest_ranks(read_history(arguments.run_folder), arguments.budget)


@dataclasses.dataclass(frozen=True)
class PluginPath:
    """The output of plugin-path: the folder of bridge.py."""

    path: str

    def __str__(self):
        return self.path


def _plugin_path_options(parser):
    add_command(parser, _plugin_path)


def _plugin_path(_: argparse.Namespace) -> PluginPath:
    # Without importing MindFormers, which takes seconds, because this runs inside a shell's $( ).
    return PluginPath(str(_PACKAGE / "training" / "launch" / "register_path"))


@dataclasses.dataclass(frozen=True)
class EvaReport:
    """The adapter written by mindlora eva; str() is YAML to paste into pet_config.

    Attributes:
        output (str): Its folder.
        ranks (dict): Path -> rank of each selected cell.
        batches (int): Number of batches that were read.
        unsettled (tuple of str): Cells whose directions still changed with the last batch.
        keys (dict): The keys of pet_config that load the adapter and give its cells these ranks.
    """

    output: str
    ranks: Dict[str, int]
    batches: int
    unsettled: Tuple[str, ...]
    keys: Dict[str, Any]

    def __str__(self) -> str:
        import yaml

        lines = [
            f"# {sum(self.ranks.values())} ranks for {len(self.ranks)} cells, between {min(self.ranks.values())} and "
            f"{max(self.ranks.values())} each, from {self.batches} batches."
        ]
        if self.unsettled:
            lines.append(
                f"# The directions of {len(self.unsettled)} cells still changed with the last batch: give more --rows."
            )
        lines.append("# Paste this into model.model_config.pet_config.")
        return "\n".join([*lines, yaml.safe_dump(self.keys, sort_keys=False, width=120).rstrip()])


def _eva_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " EVA (Paischer et al., 2024): A holds the strongest directions of what each cell reads, and cells whose "
        "directions explain more get more rank. It runs the base on one device."
    )
    parser.add_argument(
        "yaml",
        metavar="YAML",
        help="MindFormers YAML of the run, with its base, pet_config and data; --a.b.c VALUE and the flags of "
        "mindlora-run override its keys, for instance --train_dataset_dir PATH",
    )
    parser.add_argument(
        "--output", required=True, metavar="FOLDER", help="where to write the adapter, in PEFT's format"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=_EVA_ROWS,
        metavar="N",
        help="rows of the data to read at most (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=_EVA_BATCH,
        metavar="N",
        help="rows that are read at once (default: %(default)s)",
    )
    parser.add_argument(
        "--rho",
        type=float,
        default=2.0,
        metavar="X",
        help="the most ranks of a cell, in multiples of lora_rank; 1 leaves all as they are (default: %(default)s)",
    )
    parser.add_argument(
        "--tau",
        type=float,
        default=0.99,
        metavar="X",
        help="reading ends once each direction has this cosine with that of a batch before (default: %(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing FOLDER")
    parser.add_argument("--verbose", action="store_true", help="print MindFormers' log on standard error")
    parser.set_defaults(overrides=[])
    add_command(parser, _eva)


def _eva(arguments: argparse.Namespace) -> EvaReport:
    from mindlora.core.errors import ConfigError
    from mindlora.core.fields import COUNT, check_number
    from mindlora.files.adapters import files

    check_number(arguments.rows, "--rows", COUNT)
    check_number(arguments.batch_size, "--batch-size", COUNT)
    if os.path.exists(arguments.output) and not arguments.overwrite:
        raise ConfigError(f"{arguments.output} exists. Name another --output, or pass --overwrite.")
    files.check_adapter_output(arguments.output, "peft")
    prepare_imports()
    with log_elsewhere(arguments.verbose):
        import_mindformers()
        from mindlora.training.launch.eva import eva_of

        found = eva_of(
            arguments.yaml, arguments.overrides, arguments.rows, arguments.batch_size, arguments.rho, arguments.tau
        )
    files.write(found.adapter, arguments.output)
    keys = {"adapter_path": arguments.output, **found.keys}
    return EvaReport(arguments.output, found.ranks, found.batches, found.unsettled, keys)


@dataclasses.dataclass(frozen=True)
class ReferenceReport:
    """The result of mindlora reference: MindRecord -> number of rows."""

    rows: Dict[str, int]
    preference_key: ClassVar[str] = "runner_wrapper.preference"
    columns_key: ClassVar[str] = "train_dataset.input_columns"

    def __str__(self) -> str:
        lines = [f"{path}: {count} rows with the reference's log-probabilities" for path, count in self.rows.items()]
        lines.append(
            f"{self.preference_key}: set precomputed_reference: True; {self.columns_key}: add 'reference' at the end"
        )
        return "\n".join(lines)


class PynativeReferenceReport(ReferenceReport):
    """The result of mindlora reference for MindFormers' PyNative Trainer."""

    preference_key = "preference"
    columns_key = "train_dataset.dataloader.column_names"


def _reference_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Each MindRecord that the run learns from or is judged by (HeldOutLoss) gets the columns reference and "
        "reference_fingerprint. It runs on one device."
    )
    parser.add_argument(
        "yaml",
        metavar="YAML",
        help="MindFormers YAML of the run, with its base, pet_config, preference and data; --a.b.c VALUE and the flags "
        "of mindlora-run override its keys",
    )
    parser.add_argument(
        "--batch-size", type=int, metavar="N", help="rows that are computed at once (default: those of a batch)"
    )
    parser.add_argument("--verbose", action="store_true", help="print MindFormers' log on standard error")
    parser.set_defaults(overrides=[])
    add_command(parser, _reference)


def _reference(arguments: argparse.Namespace) -> ReferenceReport:
    from mindlora.core.fields import COUNT, check_number

    if arguments.batch_size is not None:
        check_number(arguments.batch_size, "--batch-size", COUNT)
    prepare_imports()
    with log_elsewhere(arguments.verbose):
        import_mindformers()
        from mindlora.training.launch.pynative_run import is_for_pynative

        given = arguments.yaml, arguments.overrides, arguments.batch_size
        if is_for_pynative(arguments.yaml):
            from mindlora.training.preference import pynative_references

            return PynativeReferenceReport(pynative_references.keep_reference(*given))
        from mindlora.training.preference.references import keep_reference

        return ReferenceReport(keep_reference(*given))


VERBS = (
    Verb("doctor", "Show what is installed, and check the YAMLs of a run.", _doctor_options),
    Verb("plan", "Say what a run will take: memory, steps, files, and what to change so that it fits.", _plan_options),
    Verb("report", "Make the page of a training run, or one that compares several.", _report_options),
    Verb("runs", "List the training runs below a folder.", _runs_options),
    Verb("suggest", "Suggest ranks for each cell, from a run.", _suggest_options),
    Verb(
        "plugin-path", "Print the folder for --register_path of MindFormers' run_mindformer.py.", _plugin_path_options
    ),
    Verb("eva", "Make the adapter with which a run begins, from its base and its data (EVA).", _eva_options),
    Verb(
        "reference", "Compute the reference of preference training once, and keep it with the data.", _reference_options
    ),
)
