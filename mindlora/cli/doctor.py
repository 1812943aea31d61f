"""mindlora doctor: what stands on this machine, and what is wrong in a YAML."""

import warnings

from mindlora.cli.verb import Verb, add_command


def _doctor_options(parser):
    parser.description += " The exit code is 1 where a YAML has an error."
    parser.add_argument(
        "yamls", nargs="*", metavar="YAML", help="complete YAMLs of MindFormers, checked without building the network"
    )
    add_command(parser, examine)


def examine(arguments):
    """mindlora doctor"""
    from mindlora.doctor import machine

    with warnings.catch_warnings():
        # Of other packages while MindFormers is imported; what mindlora has to say is in the report.
        warnings.simplefilter("ignore")
        return machine.examine(arguments.yamls)


VERBS = (Verb("doctor", "Say what is installed, and what is wrong in the YAMLs of a run.", _doctor_options),)
