"""mindlora configs: lists the YAMLs that come with mindlora, copies one, or writes one for a model's folder."""

import argparse
import dataclasses
import os
import pathlib
import re
from typing import Any, Dict, Optional, Tuple

import yaml

from mindlora.cli.verb import Verb, add_command, quiet_transformers
from mindlora.core import atomic
from mindlora.core.errors import ConfigError
from mindlora.core.text import fields, suggestion
from mindlora.training.rl.teacher import teacher_of

_PACKAGE = pathlib.Path(__file__).resolve().parent.parent
# Options that shape the YAML of --from, and have no effect without it.
_OF_A_DRAFT = ("device", "devices", "seq_length", "recipe", "data", "prompts", "rewards", "teacher")


@dataclasses.dataclass(frozen=True)
class Configurations:
    """The configurations in a folder: name for ``mindlora configs NAME`` -> the first line of its comment."""

    folder: str
    summaries: Dict[str, str]

    def __str__(self) -> str:
        return (
            f"{fields(self.summaries.items())}\n\nTo copy one: mindlora configs NAME --output my.yaml\n"
            "To write one for a model's folder: mindlora configs --from FOLDER --output my.yaml"
        )


@dataclasses.dataclass(frozen=True)
class CopiedConfiguration:
    """A copied configuration, and the written file."""

    name: str
    output: str

    def __str__(self) -> str:
        return f"{self.output}: a copy of {self.name}. Its comments say what it is for and how to run it."


@dataclasses.dataclass(frozen=True)
class WrittenConfiguration:
    """The YAML that was written for a model's folder.

    Attributes:
        parameters, trained (int): Elements of all parameters, and of those that are trained.
        steps (int): Steps of the run, or None if no data was named.
        notes (tuple of str): Further notes for the user.
        commands (tuple of str): What to do next, in order.
    """

    output: str
    model: str
    parameters: int
    trained: int
    steps: Optional[int]
    notes: Tuple[str, ...]
    commands: Tuple[str, ...]

    def __str__(self) -> str:
        steps = "" if self.steps is None else f"; steps: {self.steps:,}"
        lines = [f"{self.output}: {self.model}, {self.trained:,} of {self.parameters:,} parameters trained{steps}"]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, "Next:", *(f"  {command}" for command in self.commands)])


def _configs_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mindlora configs [NAME | --from FOLDER] [--output FILE] [more options: --help]"
    parser.add_argument("name", nargs="?", metavar="NAME", help="the configuration to copy; without it, list them")
    parser.add_argument("--output", metavar="FILE", help="where to write the YAML")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    drafts = parser.add_argument_group("for a model of your own")
    drafts.add_argument(
        "--from",
        dest="folder",
        metavar="FOLDER",
        help="write the YAML that trains an adapter on the model in FOLDER, from Hugging Face: config.json, tokenizer, "
        "weights",
    )
    drafts.add_argument("--device", choices=("cpu", "npu"), help="what it trains on (default: npu)")
    drafts.add_argument("--devices", type=int, metavar="N", help="how many of them (default: 1)")
    drafts.add_argument("--data", metavar="PATH", help="the MindRecord that it trains on, as mindlora data writes it")
    drafts.add_argument("--prompts", metavar="FILE", help="prompts whose answers it learns from (docs/rl.md)")
    drafts.add_argument(
        "--rewards", metavar="NAME,NAME", help="what rates the answers to --prompts, such as rewards.py:FUNCTION"
    )
    drafts.add_argument(
        "--teacher",
        metavar="TEACHER",
        help="whose log-probabilities of the answers it learns: base, an adapter, or '{url: URL, model: NAME}'",
    )
    drafts.add_argument(
        "--seq-length", type=int, metavar="N", help="tokens of a row (default: those of --data, or at most 2048)"
    )
    drafts.add_argument("--recipe", metavar="NAME", help="rank, alpha, dropout and rate of a preset (docs/keys.md)")
    add_command(parser, _configs)


def _configs(arguments: argparse.Namespace) -> object:
    surplus = [option for option in _OF_A_DRAFT if getattr(arguments, option) is not None]
    if arguments.folder is None and surplus:
        raise ConfigError(f"--{surplus[0].replace('_', '-')} is about a model's own YAML: name its folder with --from.")
    if arguments.folder is not None and arguments.name is not None:
        raise ConfigError(
            f"{arguments.name} names a configuration to copy, and --from {arguments.folder} a model to write one for. "
            "Give one of them."
        )
    if arguments.folder is not None:
        return _write(arguments)
    configurations = _configurations()
    if arguments.name is not None:
        return _copy(configurations, arguments.name, arguments.output, arguments.overwrite)
    if arguments.output is not None:
        raise ConfigError(
            f"--output {arguments.output} needs the NAME of a configuration, or --from FOLDER: choose one from "
            "mindlora configs."
        )
    return configurations


def _teacher(text: Optional[str]) -> Any:
    """Returns the value of --teacher for a YAML: text that begins with a brace is a node."""
    if text is None:
        return None
    try:
        teacher = yaml.safe_load(text) if text.startswith("{") else text
    except yaml.YAMLError as problem:
        raise ConfigError(f"--teacher is {text!r}, which is not YAML. Write {{url: URL, model: NAME}}.") from problem
    teacher_of(teacher)
    return teacher


def _write(arguments: argparse.Namespace) -> WrittenConfiguration:
    """Writes the YAML of a run for the model in a folder."""
    _check_output(arguments.output, arguments.overwrite, f"the YAML for {arguments.folder}")
    quiet_transformers()
    from mindlora.data.mindrecord import first_rows
    from mindlora.run.configs.folder import read_folder
    from mindlora.run.configs.run import Request, draft_run, read_rows

    rows = None if arguments.data is None else read_rows(arguments.data, first_rows)
    request = Request(
        arguments.output,
        arguments.device or "npu",
        1 if arguments.devices is None else arguments.devices,
        arguments.seq_length,
        arguments.recipe,
        rows,
        arguments.prompts,
        tuple(arguments.rewards.split(",")) if arguments.rewards else (),
        _teacher(arguments.teacher),
    )
    folder = read_folder(arguments.folder, to_train=True)
    draft = draft_run(folder, request)
    with atomic.replace_file(arguments.output) as new:
        pathlib.Path(new).write_text(draft.text, encoding="utf-8")
    title = folder.architecture.title
    return WrittenConfiguration(
        arguments.output, title, draft.parameters, draft.trained, draft.steps, draft.notes, draft.commands
    )


def _check_output(output: Optional[str], overwrite: bool, what: str) -> str:
    """Returns the path to write to; raises ConfigError if it is missing, or a file that may not be replaced."""
    if output is None:
        raise ConfigError(f"Say where {what} goes, for instance --output my.yaml")
    if os.path.exists(output) and not overwrite:
        raise ConfigError(f"--output {output} exists already. Give another path, or replace it with --overwrite.")
    return output


def _configurations() -> Configurations:
    """Returns the configurations of this installation."""
    # A wheel has them inside the package; a checkout beside it.
    for folder in (_PACKAGE / "configs", _PACKAGE.parent / "configs"):
        paths = sorted(folder.glob("*/*.yaml"))
        if paths:
            names = {path.relative_to(folder).with_suffix("").as_posix(): _summary(path) for path in paths}
            return Configurations(str(folder), names)
    raise ConfigError(f"{_PACKAGE} has no configurations beside it: install mindlora with pip.")


def _summary(path: pathlib.Path) -> str:
    with open(path, encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()


def _copy(configurations: Configurations, name: str, output: Optional[str], overwrite: bool) -> CopiedConfiguration:
    """Copies the configuration of that name, with or without .yaml."""
    name = name.removesuffix(".yaml")
    if name not in configurations.summaries:
        raise ConfigError(f"There is no configuration {name!r}.{suggestion(name, list(configurations.summaries))}")
    output = _check_output(output, overwrite, f"the copy of {name}")
    source = pathlib.Path(configurations.folder) / f"{name}.yaml"
    text = source.read_text(encoding="utf-8")
    # The copy is in a different folder from the file that base_config names.
    copied = re.sub(
        r"^(base_config: )(\S+)", lambda line: f"{line[1]}{source.parent.resolve() / line[2]}", text, flags=re.M
    )
    with atomic.replace_file(output) as new:
        pathlib.Path(new).write_text(copied, encoding="utf-8")
    return CopiedConfiguration(name, output)


VERBS = (
    Verb("configs", "List the YAMLs that come with mindlora, copy one, or write one for a model.", _configs_options),
)
