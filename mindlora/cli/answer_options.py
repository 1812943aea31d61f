"""The options that say what prompts become and how answers are chosen: for generate and chat."""

import argparse
from typing import TYPE_CHECKING

from mindlora.cli.engine_options import given_fields
from mindlora.errors import RequestError

if TYPE_CHECKING:
    from mindlora.serving.request import Sampling

# Options that are fields of Sampling: name, type, help.
_SAMPLING = (
    ("top-p", float, "draw from the likeliest tokens whose probabilities add up to this (default: 1, all)"),
    ("top-k", int, "draw from so many of the likeliest tokens (default: 0, all)"),
    ("repetition-penalty", float, "above 1, tokens that occurred already become less likely (default: 1)"),
    ("seed", int, "seed of the draws: the same seed gives the same answer (default: a new one each time)"),
)


def add_prompt_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --template, --chat-template and --system.

    Args:
        parser (ArgumentParser): Of the verb.
        default (str): What is done without them, for the help.
    """
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--template",
        metavar="FORM",
        help="what a text becomes: chat (the tokenizer's chat template), alpaca or plain (the prompts of mindlora data "
        rf"alpaca), a text with {{instruction}} and \n for a new line, or none, the text itself (default: {default})",
    )
    group.add_argument("--chat-template", metavar="FILE", help="chat template in Jinja, instead of the tokenizer's own")
    group.add_argument("--system", metavar="TEXT", help="system message, for a chat template")


def add_sampling_options(parser: argparse.ArgumentParser, temperature: float, max_tokens: str) -> None:
    """Adds the options for the fields of Sampling.

    Args:
        parser (ArgumentParser): Of the verb.
        temperature (float): Its default.
        max_tokens (str): The default of --max-tokens, for the help.
    """
    group = parser.add_argument_group("answers")
    group.add_argument("--max-tokens", type=int, metavar="N", help=f"tokens of an answer (default: {max_tokens})")
    group.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="X",
        help="0 takes the likeliest token each time; the larger, the more varied (default: %(default)s)",
    )
    for name, kind, text in _SAMPLING:
        group.add_argument(f"--{name}", type=kind, metavar="X" if kind is float else "N", help=text)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends an answer; may be given repeatedly"
    )


def read_sampling(arguments: argparse.Namespace) -> "Sampling":
    r"""Returns what the options say, checked; max_tokens is left to the caller. \n in --stop is a new line.

    Raises:
        RequestError: A value is out of range.
    """
    from mindlora.serving.request import Sampling
    from mindlora.serving.sampling import check_sampling

    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise RequestError(f"--max-tokens is {arguments.max_tokens}: ask for at least one token.")
    if "" in arguments.stop:
        raise RequestError("--stop is empty: leave it out, or name a text.")
    sampling = Sampling(
        temperature=arguments.temperature,
        stop=tuple(text.replace("\\n", "\n") for text in arguments.stop),
        **given_fields(arguments, [name for name, *_ in _SAMPLING]),
    )
    check_sampling(sampling)
    return sampling
