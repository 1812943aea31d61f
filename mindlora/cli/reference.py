"""mindlora reference: the reference of preference training, computed once and kept with the data."""

import argparse
import dataclasses
from typing import ClassVar, Dict

from mindlora.cli.engine import log_elsewhere, prepare_imports
from mindlora.cli.verb import Verb, add_command
from mindlora.training.launch.imports import import_mindformers


@dataclasses.dataclass(frozen=True)
class ReferenceReport:
    """What mindlora reference wrote: MindRecord -> its rows."""

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
    """What it wrote for MindFormers' PyNative Trainer."""

    preference_key = "preference"
    columns_key = "train_dataset.dataloader.column_names"


def _options(parser: argparse.ArgumentParser) -> None:
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


VERBS = (Verb("reference", "Compute the reference of preference training once, and keep it with the data.", _options),)
