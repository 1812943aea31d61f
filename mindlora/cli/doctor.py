"""mindlora doctor: what is installed on this machine, and what is wrong in a YAML."""

import argparse
import warnings
from typing import TYPE_CHECKING

from mindlora.cli.verb import Verb, add_command

if TYPE_CHECKING:
    from mindlora.doctor import DoctorReport


def _doctor_options(parser):
    parser.description += " The exit code is 1 if the machine or a YAML has an error."
    parser.add_argument(
        "yamls", nargs="*", metavar="YAML", help="complete MindFormers YAMLs, checked without building the network"
    )
    add_command(parser, examine)


def examine(arguments: argparse.Namespace) -> "DoctorReport":
    """Runs mindlora doctor."""
    from mindlora import doctor

    with warnings.catch_warnings():
        # Other packages warn while MindFormers is imported; mindlora's own warnings are in the report.
        warnings.simplefilter("ignore")
        return doctor.examine(arguments.yamls)


VERBS = (Verb("doctor", "Show what is installed, and check the YAMLs of a run.", _doctor_options),)
