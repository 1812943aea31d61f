"""mindlora configs: the MindFormers YAMLs that come with mindlora."""

import argparse
import dataclasses
import os
import pathlib
import re
from typing import Dict, Optional

from mindlora.cli.verb import Verb, add_command
from mindlora.common import atomic
from mindlora.common.tables import fields
from mindlora.common.text import suggestion
from mindlora.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Configurations:
    """The configurations that there are.

    Attributes:
        folder (str): Where they are.
        summaries (dict): Name, as ``mindlora configs NAME`` takes it -> the first line of its comment.
    """

    folder: str
    summaries: Dict[str, str]

    def __str__(self) -> str:
        return f"{fields(self.summaries.items())}\n\nTo copy one: mindlora configs NAME --output my.yaml"


@dataclasses.dataclass(frozen=True)
class CopiedConfiguration:
    """A configuration that was copied.

    Attributes:
        name (str): Its name.
        output (str): The file that was written.
    """

    name: str
    output: str

    def __str__(self) -> str:
        return f"{self.output}: a copy of {self.name}. Its comments say what it is for and how to run it."


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="the configuration to copy; without it, list them")
    parser.add_argument("--output", metavar="FILE", help="where to copy it")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    add_command(parser, run)


def run(arguments: argparse.Namespace) -> object:
    """Runs mindlora configs."""
    found = configurations()
    if arguments.name is None:
        if arguments.output is not None:
            raise ConfigError(
                f"--output {arguments.output} needs the NAME of a configuration: mindlora configs lists them."
            )
        return found
    return copy(found, arguments.name, arguments.output, arguments.overwrite)


def configurations() -> Configurations:
    """Returns the configurations of this installation.

    Raises:
        ConfigError: It has none.
    """
    package = pathlib.Path(__file__).parent.parent
    # A wheel carries them in the package; in a checkout they are beside it.
    for folder in (package / "configs", package.parent / "configs"):
        paths = sorted(folder.glob("*/*.yaml"))
        if paths:
            names = {path.relative_to(folder).with_suffix("").as_posix(): _summary(path) for path in paths}
            return Configurations(str(folder), names)
    raise ConfigError(f"{package} has no configurations beside it: install mindlora with pip.")


def copy(found: Configurations, name: str, output: Optional[str], overwrite: bool = False) -> CopiedConfiguration:
    """Copies a configuration.

    Args:
        found (Configurations): Those that there are.
        name (str): One of them, with or without .yaml.
        output (str): The file to write.
        overwrite (bool): Whether it may be replaced. Default: False.

    Raises:
        ConfigError: There is no such configuration, or no output, or it exists.
    """
    name = name.removesuffix(".yaml")
    if name not in found.summaries:
        raise ConfigError(f"There is no configuration {name!r}.{suggestion(name, list(found.summaries))}")
    if output is None:
        raise ConfigError(f"Say where to copy {name}, for instance --output my.yaml")
    if os.path.exists(output) and not overwrite:
        raise ConfigError(f"--output {output} exists already. Give another path, or replace it with --overwrite.")
    source = pathlib.Path(found.folder) / f"{name}.yaml"
    text = source.read_text(encoding="utf-8")
    # The copy is in another folder than the file that base_config names.
    copied = re.sub(
        r"^(base_config: )(\S+)", lambda line: f"{line[1]}{source.parent.resolve() / line[2]}", text, flags=re.M
    )
    with atomic.replace_file(output) as new:
        pathlib.Path(new).write_text(copied, encoding="utf-8")
    return CopiedConfiguration(name, output)


def _summary(path: pathlib.Path) -> str:
    with open(path, encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()


VERBS = (Verb("configs", "List the YAMLs that come with mindlora, or copy one.", _options),)
