"""mindlora adapter convert, inspect, diff, combine, resize, gather, scatter: adapter files."""

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING, Any, Iterator, Tuple

from mindlora.cli.base_model import ARCHITECTURE, SIZES, add_base_model, base_model
from mindlora.cli.verb import Verb, add_allow_pickle, add_command, add_target_paths, group

if TYPE_CHECKING:
    from mindlora.files.adapters.sharding.run_settings import RunSettings

_ADAPTER_HELP = "an adapter: a folder, or a .safetensors, .ckpt or .bin file"
_OUTPUT_HELP = "the folder to write, in PEFT's format; of Stable Diffusion in diffusers'"


class _Forms:
    """The forms that can be written, imported only when a command needs them, and ``more``."""

    def __init__(self, *more: str) -> None:
        self._more = more

    def __iter__(self) -> Iterator[str]:
        from mindlora.files.adapters.dialects.registry import FORMS

        return iter((*FORMS, *self._more))

    def __contains__(self, name: object) -> bool:
        return name in tuple(self)


@dataclasses.dataclass(frozen=True)
class CombineReport:
    """The result of combine: (path, weight) of each adapter, the distinct ranks and the number of cells."""

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


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help=f"{_ADAPTER_HELP} of PEFT, MindFormers, diffusers, kohya or mlx-lm")
    parser.add_argument(
        "output",
        metavar="OUT",
        help="a folder for peft, slora and diffusers, a .safetensors file for mindformers, mcore and kohya, a .ckpt "
        "file for ckpt, a .gguf file for gguf",
    )
    parser.add_argument(
        "--to",
        metavar="FORM",
        choices=_Forms("gguf"),
        help="needed unless OUT ends in .gguf. peft: what PEFT and vLLM load; mindformers, ckpt: MindFormers' own "
        "names; slora: the folder that MindFormers serves an adapter from; mcore: what MindFormers' own LoRA on an "
        "mcore model reads; pynative: the folder that MindFormers 2's PyNative trainer loads; diffusers, kohya: Stable "
        "Diffusion's adapters; gguf: what llama.cpp loads beside a base",
    )
    parser.add_argument(
        "--concat", action="store_true", help="join q, k, v and w1, w3, for a model with qkv_concat: True"
    )
    add_base_model(
        parser,
        "--base",
        "the base's folder, with config.json, or its MindFormers YAML: its kind, and the sizes by which q, k and v are "
        "joined and split (default: the folder that the adapter names as its base, if it is here)",
        (*SIZES, ARCHITECTURE),
    )
    _add_reading_options(parser)
    parser.add_argument(
        "--part",
        choices=("unet", "text_encoder", "text_encoder_2"),
        help="convert this part of a Stable Diffusion adapter alone (needed for peft and ckpt if IN has several)",
    )
    add_target_paths(parser)
    parser.add_argument(
        "--experts",
        choices=("stacked", "single"),
        help="pairs of routed experts: one for each stacked weight of a layer (PEFT's target_parameters), or of each "
        "expert by itself (PEFT's older form)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    add_command(parser, _convert)


def _convert(arguments: argparse.Namespace) -> Any:
    from mindlora.files.adapters.convert import convert_adapter

    base = base_model(arguments)
    return convert_adapter(
        arguments.input,
        arguments.output,
        arguments.to or _form_of(arguments.output),
        arguments.alpha,
        base.heads,
        arguments.concat,
        arguments.allow_pickle,
        arguments.overwrite,
        arguments.part,
        arguments.target_paths,
        arguments.architecture,
        arguments.experts,
        base.config or None,
    )


def _form_of(output: str) -> str:
    """Returns the form of a file whose ending is unique to it."""
    from mindlora.core.errors import ConfigError
    from mindlora.core.formats import gguf_file

    if not output.endswith(gguf_file.ENDING):
        raise ConfigError(
            f"OUT is {output}, whose form its name does not tell. Say which one to write: --to "
            f"{', '.join(_Forms('gguf'))}."
        )
    return "gguf"


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
        metavar="ENGINE[==VERSION]",
        help="say instead whether vllm, vllm-ascend, vllm-mindspore, mindie, llama.cpp or ollama would serve it as it "
        "is, and what to do if not; the exit code is 1 then",
    )
    add_target_paths(parser)
    _add_reading_options(parser)
    add_command(parser, _inspect)


def _inspect(arguments: argparse.Namespace) -> Any:
    from mindlora.files.adapters.inspect import inspect_adapter
    from mindlora.files.adapters.servers import check_for_server

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
    add_command(parser, _diff)


def _diff(arguments: argparse.Namespace) -> Any:
    from mindlora.files.adapters.compare import compare_adapters

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
    add_command(parser, _combine)


def _combine(arguments: argparse.Namespace) -> CombineReport:
    from mindlora.files.adapters import files as adapter_files
    from mindlora.files.adapters.combine import combine_adapters

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
    from mindlora.core.errors import ConfigError

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
    add_command(parser, _resize)


def _resize(arguments: argparse.Namespace) -> Any:
    from mindlora.files.adapters.resize import resize_adapter

    return resize_adapter(
        arguments.path,
        arguments.output,
        rank=arguments.rank,
        energy=arguments.energy,
        alpha=arguments.alpha,
        allow_pickle=arguments.allow_pickle,
    )


def _add_run_options(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument(
        "--config",
        metavar="YAML",
        help="the YAML of the run: its pet_config states lora_alpha, its model_config the sizes of the attention",
    )
    parser.add_argument("--alpha", type=float, metavar="N", help="lora_alpha, if neither the files nor --config do")
    add_base_model(
        parser,
        "--base",
        f"the model's folder, with config.json, or its MindFormers YAML: the sizes by which q, k and v are {purpose} "
        "(default: from --config)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT")


def _run_settings(arguments: argparse.Namespace) -> "RunSettings":
    """Returns the RunSettings of the options."""
    from mindlora.files.adapters.sharding.run_settings import RunSettings, heads_of, pet_config_of

    heads = base_model(arguments).heads
    if not arguments.config:
        return RunSettings(lora_alpha=arguments.alpha, heads=heads)
    from mindlora.core.yaml_file import read_yaml
    from mindlora.run.checks.pet_config import PetLoraConfig
    from mindlora.run.yaml_run import YamlRun

    model_config = YamlRun(read_yaml(arguments.config)).language.model
    config = PetLoraConfig.from_pet_config(pet_config_of(model_config, arguments.config))
    return RunSettings(config, arguments.alpha, heads_of(model_config, heads), arguments.config)


def _gather_options(parser: argparse.ArgumentParser) -> None:
    parser.description += (
        " Every rank must be there with the same step, and its slices must make up each tensor exactly once."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder that holds rank_0, rank_1, ...")
    parser.add_argument(
        "--output",
        metavar="OUT",
        help="a folder for peft and slora, a .safetensors file for mindformers, a .ckpt file for ckpt (default: "
        "adapter, with that ending, beside CHECKPOINT)",
    )
    parser.add_argument(
        "--strategy",
        metavar="PATH",
        help="the run's strategy files: a folder, or one file (default: the folder strategy in or beside CHECKPOINT)",
    )
    parser.add_argument(
        "--to",
        default="peft",
        metavar="FORM",
        choices=_Forms(),
        help="form of OUT, as for mindlora adapter convert (default: peft)",
    )
    parser.add_argument("--step", metavar="E_S", help="epoch and step in it, such as 2_100 (default: the newest)")
    _add_run_options(parser, "split")
    add_command(parser, _gather)


def _gather(arguments: argparse.Namespace) -> Any:
    from mindlora.files.adapters.sharding.gather import gather_adapter

    return gather_adapter(
        arguments.checkpoint,
        arguments.output or _beside(arguments.checkpoint, arguments.to),
        arguments.to,
        arguments.strategy,
        _run_settings(arguments),
        arguments.step,
        arguments.overwrite,
    )


def _beside(checkpoint: str, to: str) -> str:
    from mindlora.files.adapters.dialects.registry import FORMS

    return os.path.join(os.path.dirname(os.path.abspath(checkpoint)), f"adapter{FORMS[to].ending}")


def _scatter_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="ADAPTER", help=_ADAPTER_HELP)
    parser.add_argument("--strategy", required=True, metavar="PATH", help="the strategy files of the run to start")
    parser.add_argument("--output", required=True, metavar="OUT", help="the folder to write: rank_0, rank_1, ...")
    parser.add_argument(
        "--format",
        default="safetensors",
        choices=("safetensors", "ckpt"),
        help="form of the files (default: safetensors)",
    )
    add_allow_pickle(parser)
    _add_run_options(parser, "joined or split")
    add_command(parser, _scatter)


def _scatter(arguments: argparse.Namespace) -> Any:
    from mindlora.files.adapters.sharding.scatter import scatter_adapter

    return scatter_adapter(
        arguments.adapter,
        arguments.output,
        arguments.strategy,
        arguments.format,
        _run_settings(arguments),
        arguments.allow_pickle,
        arguments.overwrite,
    )


OF_ADAPTERS = (
    Verb("convert", "Convert an adapter to another format.", _convert_options),
    Verb("inspect", "Show what an adapter holds.", _inspect_options),
    Verb("diff", "Show how two adapters differ.", _diff_options),
    Verb("combine", "Combine several adapters of one base into one.", _combine_options),
    Verb("resize", "Write an adapter at a smaller rank.", _resize_options),
    Verb("gather", "Join the slices of an adapter that the ranks of a sharded run saved.", _gather_options),
    Verb("scatter", "Cut an adapter into the slices of the ranks of a sharded run.", _scatter_options),
)
VERBS = (group("adapter", "Work on adapter files: convert, inspect, combine them and so on.", OF_ADAPTERS),)
