"""mindlora gather, scatter: adapters of sharded runs."""

import argparse
import os
from typing import Any

from mindlora.cli.convert import add_allow_pickle, add_heads
from mindlora.cli.verb import Verb, add_command


def _add_run_options(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument(
        "--config",
        metavar="YAML",
        help="the YAML of the run: its pet_config states lora_alpha, its model_config the sizes of the attention",
    )
    parser.add_argument("--alpha", type=float, metavar="N", help="lora_alpha, if neither the files nor --config do")
    add_heads(parser, purpose)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT")


def _settings(arguments: argparse.Namespace) -> Any:
    """Returns the RunSettings that the options give."""
    from mindlora.adapters.convert import Heads
    from mindlora.adapters.sharding.run_settings import RunSettings, heads_of, pet_config_of

    given = Heads(arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.q_lora_rank)
    if not arguments.config:
        return RunSettings(lora_alpha=arguments.alpha, heads=given)
    from mindlora.checks.language_model import language_model
    from mindlora.checks.mcore import model_config_of
    from mindlora.checks.pet_config import PetLoraConfig
    from mindlora.common.yaml_file import read_yaml

    model_config = model_config_of(language_model(read_yaml(arguments.config))[0])
    config = PetLoraConfig.from_pet_config(pet_config_of(model_config, arguments.config))
    return RunSettings(config, arguments.alpha, heads_of(model_config, given), arguments.config)


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
        choices=("peft", "mindformers", "ckpt", "slora", "mcore", "diffusers", "kohya"),
        help="form of OUT, as for mindlora convert (default: peft)",
    )
    parser.add_argument("--step", metavar="E_S", help="epoch and step in it, such as 2_100 (default: the newest)")
    _add_run_options(parser, "split")
    add_command(parser, gather)


def gather(arguments: argparse.Namespace) -> Any:
    """Runs mindlora gather."""
    from mindlora.adapters.sharding.gather import gather_adapter

    return gather_adapter(
        arguments.checkpoint,
        arguments.output or _beside(arguments.checkpoint, arguments.to),
        arguments.to,
        arguments.strategy,
        _settings(arguments),
        arguments.step,
        arguments.overwrite,
    )


def _beside(checkpoint: str, to: str) -> str:
    single = {"mindformers": ".safetensors", "mcore": ".safetensors", "kohya": ".safetensors", "ckpt": ".ckpt"}
    ending = single.get(to, "")
    return os.path.join(os.path.dirname(os.path.abspath(checkpoint)), f"adapter{ending}")


def _scatter_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", metavar="ADAPTER", help="an adapter: a folder, .safetensors, .ckpt or .bin")
    parser.add_argument("--strategy", required=True, metavar="PATH", help="the strategy files of the run to start")
    parser.add_argument("--output", required=True, metavar="OUT", help="the folder to write: rank_0, rank_1, ...")
    parser.add_argument(
        "--format", default="safetensors", choices=("safetensors", "ckpt"), help="of the files (default: safetensors)"
    )
    add_allow_pickle(parser)
    _add_run_options(parser, "join or split")
    add_command(parser, scatter)


def scatter(arguments: argparse.Namespace) -> Any:
    """Runs mindlora scatter."""
    from mindlora.adapters.sharding.scatter import scatter_adapter

    return scatter_adapter(
        arguments.adapter,
        arguments.output,
        arguments.strategy,
        arguments.format,
        _settings(arguments),
        arguments.allow_pickle,
        arguments.overwrite,
    )


VERBS = (
    Verb("gather", "Join the slices of an adapter that the ranks of a sharded run saved.", _gather_options),
    Verb("scatter", "Cut an adapter into the slices of the ranks of a sharded run.", _scatter_options),
)
