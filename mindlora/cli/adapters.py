"""mindlora inspect, diff, combine, resize: adapter files."""

import argparse
import dataclasses
from typing import Any, Tuple

from mindlora.cli.convert import add_allow_pickle, add_target_paths
from mindlora.cli.verb import Verb, add_command

_ADAPTER_HELP = "an adapter: a folder, or a .safetensors, .ckpt or .bin file"
_OUTPUT_HELP = "the folder to write, in PEFT's format; of Stable Diffusion in diffusers'"


@dataclasses.dataclass(frozen=True)
class CombineReport:
    """What mindlora combine wrote.

    Attributes:
        output (str): The folder.
        method (str): The method of combining.
        adapters (tuple): (path, weight) of each adapter.
        ranks (tuple of int): The distinct ranks in the result.
        cells (int): How many cells the result adapts.
    """

    output: str
    method: str
    adapters: Tuple[Tuple[str, float], ...]
    ranks: Tuple[int, ...]
    cells: int

    def __str__(self) -> str:
        parts = "\n".join(f"  {weight:g} x {path}" for path, weight in self.adapters)
        return (
            f"{self.output}: {self.cells} cells, rank {', '.join(map(str, self.ranks))}, by method {self.method} "
            f"from\n{parts}"
        )


def _add_reading_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alpha", type=float, metavar="N", help="lora_alpha that was trained with, if a file does not state it"
    )
    add_allow_pickle(parser)


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help=_ADAPTER_HELP)
    parser.add_argument(
        "--energy",
        action="store_true",
        help="also show the singular values of each cell's change, and the rank that holds 90, 95 and 99 %% of them",
    )
    parser.add_argument(
        "--for",
        dest="server",
        metavar="SERVER",
        help="say instead whether vllm, vllm-ascend or vllm-mindspore would serve it as it is, and what to do if not; "
        "the exit code is 1 then",
    )
    add_target_paths(parser)
    _add_reading_options(parser)
    add_command(parser, inspect)


def inspect(arguments: argparse.Namespace) -> Any:
    """Runs mindlora inspect."""
    from mindlora.adapters.inspect import inspect_adapter
    from mindlora.adapters.servers import check_for_server

    if arguments.server is not None:
        return check_for_server(
            arguments.path, arguments.server, alpha=arguments.alpha, allow_pickle=arguments.allow_pickle
        )
    return inspect_adapter(
        arguments.path,
        alpha=arguments.alpha,
        allow_pickle=arguments.allow_pickle,
        energy=arguments.energy,
        target_paths=arguments.target_paths,
    )


def _diff_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " The exit code is 0 whenever both could be compared; the report says whether they are equal (with --json, in "
        "the field equal)."
    )
    parser.add_argument("first", metavar="A", help=_ADAPTER_HELP)
    parser.add_argument("second", metavar="B", help="another one, in any format")
    _add_reading_options(parser)
    add_command(parser, diff)


def diff(arguments: argparse.Namespace) -> Any:
    """Runs mindlora diff."""
    from mindlora.adapters.compare import compare_adapters

    return compare_adapters(
        arguments.first, arguments.second, alpha=arguments.alpha, allow_pickle=arguments.allow_pickle
    )


def _combine_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Methods cat and svd sum the changes of the weights, cat exactly and svd at a rank you "
        "choose; linear, ties, dare_linear, dare_ties and magnitude_prune work on A and on B separately "
        "and need equal ranks; those with _svd do the same on the changes. All are PEFT's."
    )
    parser.add_argument("output", metavar="OUT", help=_OUTPUT_HELP)
    parser.add_argument(
        "--method",
        required=True,
        metavar="M",
        help="cat, svd, linear, ties, dare_linear, dare_ties, magnitude_prune, ties_svd, "
        "dare_linear_svd, dare_ties_svd or magnitude_prune_svd",
    )
    parser.add_argument(
        "--adapter",
        required=True,
        nargs=2,
        action="append",
        metavar=("PATH", "WEIGHT"),
        help="an adapter and its weight; give it once for each adapter",
    )
    parser.add_argument(
        "--svd-rank",
        type=int,
        metavar="R",
        help="rank of the result, for the methods with svd (default: the largest rank of the adapters)",
    )
    parser.add_argument(
        "--density",
        type=float,
        metavar="D",
        help="share of the elements to keep, for ties, dare and magnitude_prune: above 0, up to 1",
    )
    parser.add_argument(
        "--majority-sign", default="total", metavar="S", help="total (default) or frequency: how ties elects a sign"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of dare's random elements (default: 0)")
    _add_reading_options(parser)
    add_command(parser, combine)


def combine(arguments: argparse.Namespace) -> CombineReport:
    """Runs mindlora combine."""
    from mindlora.adapters import files as adapter_files
    from mindlora.adapters.combine import combine_adapters

    paths = [path for path, _ in arguments.adapter]
    weights = [_weight(path, text) for path, text in arguments.adapter]
    adapter_files.check_adapter_output(arguments.output, "peft")
    result = combine_adapters(
        adapter_files.read_adapters(paths, arguments.alpha, arguments.allow_pickle),
        weights,
        arguments.method,
        svd_rank=arguments.svd_rank,
        density=arguments.density,
        majority_sign=arguments.majority_sign,
        seed=arguments.seed,
    )
    adapter_files.write_folder(result, arguments.output)
    return CombineReport(
        arguments.output,
        arguments.method,
        tuple(zip(paths, weights)),
        tuple(sorted(set(map(result.rank, result.paths)))),
        len(result.paths),
    )


def _weight(path: str, text: str) -> float:
    from mindlora.errors import ConfigError

    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--adapter {path} {text}: the weight must be a number, such as 0.5.") from None


def _resize_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Keeps the largest singular values of scale B A in each cell, which is the best approximation at that rank, "
        "and reports the error. Cells whose rank is small enough are copied."
    )
    parser.add_argument("path", metavar="PATH", help=_ADAPTER_HELP)
    parser.add_argument("output", metavar="OUT", help=_OUTPUT_HELP)
    parser.add_argument("--rank", type=int, metavar="R", help="the largest rank of a cell")
    parser.add_argument(
        "--energy",
        type=float,
        metavar="E",
        help="the share of each cell's energy (squared singular values) to keep, such as 0.95; the ranks then differ. "
        "With --rank, that is the limit",
    )
    _add_reading_options(parser)
    add_command(parser, resize)


def resize(arguments: argparse.Namespace) -> Any:
    """Runs mindlora resize."""
    from mindlora.adapters.resize import resize_adapter

    return resize_adapter(
        arguments.path,
        arguments.output,
        rank=arguments.rank,
        energy=arguments.energy,
        alpha=arguments.alpha,
        allow_pickle=arguments.allow_pickle,
    )


VERBS = (
    Verb("inspect", "Show what an adapter holds.", _inspect_options),
    Verb("diff", "Show how two adapters differ.", _diff_options),
    Verb("combine", "Combine several adapters of one base into one.", _combine_options),
    Verb("resize", "Write an adapter at a smaller rank.", _resize_options),
)
