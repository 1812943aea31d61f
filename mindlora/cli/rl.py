"""mindlora rl: a training run that learns from rewards."""

import argparse
import dataclasses

from mindlora.cli.verb import Verb, add_command
from mindlora.core.errors import ConfigError
from mindlora.core.yaml_file import read_merged, value_at
from mindlora.run.checks.pynative import is_pynative
from mindlora.training.rl.rules import AT_THE_TOP, KEY


@dataclasses.dataclass(frozen=True)
class RlRun:
    """A completed run.

    Attributes:
        yaml (str): Its YAML.
        exit_code (int): Exit code of mindlora-run.
    """

    yaml: str
    exit_code: int

    def __str__(self) -> str:
        return f"{self.yaml}: {'the run has failed.' if self.exit_code else 'the run has ended.'}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " It samples answers to prompts, has them rated, and learns from that, over one copy of the weights: "
        "mindlora-run on a YAML with runner_wrapper.rl, as mindlora configs --prompts writes it, or of MindFormers' "
        "PyNative Trainer with rl. --a.b.c VALUE and the flags of mindlora-run override keys of the YAML."
    )
    parser.add_argument(
        "yaml", metavar="YAML", help="complete MindFormers YAML of a training run with runner_wrapper.rl, or with rl"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="go on from the last step that the run saved, or from a step folder",
    )
    parser.set_defaults(overrides=[])
    add_command(parser, _rl)


def _rl(arguments: argparse.Namespace) -> RlRun:
    content = read_merged(arguments.yaml)
    in_pynative = is_pynative(content)
    key = AT_THE_TOP if in_pynative else KEY
    if value_at(content, key) is None:
        raise ConfigError(
            f"{arguments.yaml} has no {key}, which names prompts, and rewards or a teacher. Write such a YAML with "
            "mindlora configs --from FOLDER --prompts FILE --rewards NAME, or train on data with mindlora-run."
        )
    from mindlora.training.launch import launcher

    mode = ["--mode", "1"] if in_pynative else []
    resume = [] if arguments.resume is None else ["--resume", *filter(None, [arguments.resume])]
    return RlRun(arguments.yaml, launcher.main(["--config", arguments.yaml, *mode, *resume, *arguments.overrides]))


VERBS = (Verb("rl", "Train an adapter on rewards for its own answers (GRPO, RLOO).", _options),)
