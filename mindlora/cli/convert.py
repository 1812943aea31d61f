"""mindlora convert: converts an adapter from one format to another."""

import argparse
from typing import Any

from mindlora.cli.verb import Verb, add_command


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input",
        metavar="IN",
        help="an adapter of PEFT, MindFormers, mindlora, diffusers, kohya or mlx-lm: a folder, .safetensors, .ckpt or "
        ".bin",
    )
    parser.add_argument(
        "output",
        metavar="OUT",
        help="a folder for peft, slora and diffusers, a .safetensors file for mindformers, mcore and kohya, a .ckpt "
        "file for ckpt",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("peft", "mindformers", "ckpt", "slora", "mcore", "diffusers", "kohya"),
        help="peft: what PEFT and vLLM load; mindformers, ckpt: MindFormers' own names; slora: the folder that "
        "MindFormers serves an adapter from; mcore: what MindFormers' own LoRA on an mcore model reads; diffusers, "
        "kohya: Stable Diffusion's adapters",
    )
    parser.add_argument("--alpha", type=float, metavar="ALPHA", help="lora_alpha, if IN does not state it")
    parser.add_argument(
        "--concat", action="store_true", help="join q, k, v and w1, w3, for a model with qkv_concat: True"
    )
    add_heads(parser, "join or split")
    parser.add_argument(
        "--architecture",
        metavar="TYPE",
        help="the kind of the base, as model_type in its config.json (qwen3, deepseek_v3, ...), where neither that nor "
        "the adapter tells",
    )
    add_allow_pickle(parser)
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
    add_command(parser, convert)


def add_heads(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Adds the sizes of attention by which joined cells are joined or split; ``purpose`` says which of the two."""
    parser.add_argument("--heads", type=int, metavar="N", help=f"num_heads of the model, to {purpose} w_qkv")
    parser.add_argument("--kv-heads", type=int, metavar="N", help=f"n_kv_heads of the model, to {purpose} w_qkv")
    parser.add_argument("--head-dim", type=int, metavar="N", help=f"size of a head, to {purpose} w_qkv")
    parser.add_argument(
        "--q-lora-rank", type=int, metavar="N", help=f"q_lora_rank of DeepSeek-V3, to {purpose} linear_qkv"
    )


def add_allow_pickle(parser: argparse.ArgumentParser) -> None:
    """Adds the option that lets an adapter be read from a pickle."""
    parser.add_argument(
        "--allow-pickle",
        action="store_true",
        help="read a .bin: it is a pickle; only tensors are taken from it and nothing in it is run",
    )


def add_target_paths(parser: argparse.ArgumentParser) -> None:
    """Adds the option that gives kohya's names their paths."""
    parser.add_argument(
        "--target-paths",
        metavar="FILE",
        help="text file with the paths of the network's cells, one in a line, for names in kohya's form that are not "
        "Stable Diffusion 1's, 2's or XL's",
    )


def convert(arguments: argparse.Namespace) -> Any:
    """Runs mindlora convert."""
    from mindlora.adapters.convert import Heads, convert_adapter

    return convert_adapter(
        arguments.input,
        arguments.output,
        arguments.to,
        arguments.alpha,
        Heads(arguments.heads, arguments.kv_heads, arguments.head_dim, arguments.q_lora_rank),
        arguments.concat,
        arguments.allow_pickle,
        arguments.overwrite,
        arguments.part,
        arguments.target_paths,
        arguments.architecture,
        arguments.experts,
    )


VERBS = (Verb("convert", "Convert an adapter to another format.", _options),)
