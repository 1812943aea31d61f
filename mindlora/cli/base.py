"""mindlora base convert, quantize, merge: checkpoints of base models."""

import argparse
import os
from typing import Any

from mindlora.cli.base_model import BASE_HEADS, KEY_VALUE_HEADS, add_base_model, base_model
from mindlora.cli.verb import Verb, add_allow_pickle, add_command, group, quiet_transformers

_FORMS = "a folder of .safetensors files, or one .safetensors or .ckpt file"


def _convert_options(parser):
    parser.add_argument("source", metavar="IN", help=_FORMS)
    parser.add_argument("output", metavar="OUT", help=f"{_FORMS}, depending on its ending")
    parser.add_argument(
        "--from",
        dest="from_",
        choices=("hf", "mindformers", "mcore"),
        help="whose parameter names IN has (default: found from the names)",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("hf", "mindformers", "mcore", "pynative"),
        help="whose parameter names OUT gets; of a model that MindFormers has as an mcore model alone (Qwen3, "
        "DeepSeek-V3), mindformers means mcore; pynative is the folder that MindFormers 2's PyNative trainer loads",
    )
    parser.add_argument(
        "--concat", action="store_true", help="join q, k, v and gate, up, for a model with qkv_concat: True"
    )
    parser.add_argument(
        "--tied", action="store_true", help="leave lm_head.weight out, for a model with tie_word_embeddings: True"
    )
    add_base_model(
        parser,
        "--config",
        "the model's folder, with config.json, or its MindFormers YAML, if IN has no config.json: it says how many "
        "heads there are, by which tensors are joined and split, and gives a folder with --to hf its config.json",
        BASE_HEADS,
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="what quantized weights (FP8, GPTQ, ...) are decoded to (default: the dtype that config.json says)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    add_command(parser, _convert_base)


def _convert_base(arguments: argparse.Namespace) -> Any:
    from mindlora.files.base import convert as module

    model = base_model(arguments, "--config")
    is_folder = bool(model.config) and os.path.isdir(arguments.config)
    with _Bar("base convert") as bar:
        return module.convert_base(
            arguments.source,
            arguments.output,
            arguments.from_,
            arguments.to,
            concat=arguments.concat,
            tied=arguments.tied,
            heads=model.heads.heads,
            kv_heads=model.heads.kv_heads,
            overwrite=arguments.overwrite,
            model_config=model.config if model.is_graph_yaml else None,
            config=model.config if is_folder else None,
            progress=bar,
            dtype=arguments.dtype,
        )


def _quantize_options(parser):
    parser.add_argument("source", metavar="IN", help=_FORMS)
    parser.add_argument("output", metavar="OUT", help="a .safetensors file, with MindFormers' parameter names")
    parser.add_argument(
        "--exclude",
        action="append",
        metavar="CELL",
        help="a cell to leave in float in addition to lm_head, by the end of its path; may be given several times, and "
        "quantize_exclude of the YAML must name the same cells",
    )
    loftq = parser.add_argument_group(
        "LoftQ",
        "Also write an adapter that makes up for the quantization error, and the base that belongs to it. Most of the "
        "time is spent on decomposing the weights.",
    )
    loftq.add_argument(
        "--loftq",
        metavar="FOLDER",
        help="folder to write the adapter to, in PEFT's format, for pet_config.adapter_path",
    )
    loftq.add_argument("--rank", type=int, metavar="R", help="lora_rank of the YAML")
    loftq.add_argument("--alpha", type=float, metavar="X", help="lora_alpha of the YAML (default: 16)")
    loftq.add_argument(
        "--target-modules",
        action="append",
        metavar="CELLS",
        help="target_modules of the YAML: given once, a regular expression; given several times, ends of paths "
        "(default: all-linear)",
    )
    loftq.add_argument(
        "--loftq-iterations", type=int, metavar="N", help="rounds of quantizing and decomposing (default: 1)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT and FOLDER")
    add_command(parser, _quantize_base)


def _quantize_base(arguments: argparse.Namespace) -> Any:
    from mindlora.files.base.quantize import quantize_checkpoint

    with _Bar("base quantize") as bar:
        return quantize_checkpoint(
            arguments.source,
            arguments.output,
            arguments.exclude,
            arguments.overwrite,
            bar,
            arguments.loftq,
            _loftq_config(arguments),
        )


def _loftq_config(arguments):
    """Returns the LoraConfig of LoftQ's flags, or None without them."""
    from mindlora.core.errors import ConfigError
    from mindlora.core.fields import COUNT, check_number
    from mindlora.models.lora_config import LoraConfig

    if arguments.loftq is None:
        for field in ("rank", "alpha", "target_modules", "loftq_iterations"):
            if getattr(arguments, field) is not None:
                flag = field.replace("_", "-")
                raise ConfigError(
                    f"--{flag} describes LoftQ's adapter, but --loftq is missing: give the folder to write it to."
                )
        return None
    if arguments.rank is None:
        raise ConfigError("--loftq needs --rank: give the lora_rank of the YAML that will train the adapter.")
    iterations = 1 if arguments.loftq_iterations is None else arguments.loftq_iterations
    check_number(iterations, "--loftq-iterations", COUNT)
    targets = arguments.target_modules or ["all-linear"]
    return LoraConfig(
        lora_rank=arguments.rank,
        lora_alpha=16 if arguments.alpha is None else arguments.alpha,
        target_modules=targets[0] if len(targets) == 1 else targets,
        quantize_base="nf4",
        lora_init=f"loftq_iter_{iterations}",
    )


def _merge_options(parser):
    parser.add_argument("--base", required=True, metavar="B", help=f"the base: {_FORMS}")
    parser.add_argument("--adapter", required=True, metavar="A", help="the adapter: a folder or file, in any format")
    parser.add_argument(
        "--output",
        required=True,
        metavar="OUT",
        help=f"{_FORMS}, depending on its ending; or a .gguf file, of a folder from Hugging Face",
    )
    parser.add_argument(
        "--to",
        choices=("gguf",),
        help="gguf: one file with weights and tokenizer for llama.cpp and Ollama, as for an OUT that ends in .gguf "
        "(default: the base's form)",
    )
    parser.add_argument(
        "--outtype", choices=("f32", "f16", "q8_0"), help="what a GGUF file stores weights as (default: f16)"
    )
    parser.add_argument("--alpha", type=float, metavar="X", help="lora_alpha, if the adapter does not record it")
    add_base_model(
        parser,
        "--config",
        "the model's folder, with config.json, or its MindFormers YAML, if the base has no config.json: it says how "
        "many key-value heads there are, by which q, k and v are joined",
        KEY_VALUE_HEADS,
    )
    parser.add_argument(
        "--on-base-mismatch",
        choices=("error", "warn", "ignore"),
        default="error",
        help="what to do if the adapter says that it was trained on another base (default: error)",
    )
    add_allow_pickle(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    add_command(parser, _merge)


def _merge(arguments: argparse.Namespace) -> Any:
    # Must be set before NumPy is imported. Blocks are merged in parallel: if each product used all cores, they would
    # wait for one another.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # It renders the chat template.
    quiet_transformers()
    from mindlora.core.errors import ConfigError
    from mindlora.core.formats import gguf_file
    from mindlora.files.base.merge import merge_checkpoint

    is_gguf = arguments.output.endswith(gguf_file.ENDING)
    if arguments.to == "gguf" and not is_gguf:
        raise ConfigError(f"--to gguf writes a file, but --output is {arguments.output}: give one that ends in .gguf.")
    if arguments.outtype and not is_gguf:
        raise ConfigError(
            f"--outtype is for GGUF files, but --output is {arguments.output}: give a file that ends in .gguf."
        )
    with _Bar("base merge") as bar:
        return merge_checkpoint(
            arguments.base,
            arguments.adapter,
            arguments.output,
            lora_alpha=arguments.alpha,
            kv_heads=base_model(arguments, "--config").heads.kv_heads,
            allow_pickle=arguments.allow_pickle,
            overwrite=arguments.overwrite,
            progress=bar,
            outtype=arguments.outtype or gguf_file.F16,
            on_base_mismatch=arguments.on_base_mismatch,
        )


class _Bar:
    """A progress bar on a terminal, shown after a second; call it with the bytes just processed and the total bytes."""

    def __init__(self, name):
        self._name = name
        self._bar = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.close()

    def __call__(self, nbytes, total):
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(desc=self._name, total=total, unit="B", unit_scale=True, delay=1, disable=None)
        self._bar.update(nbytes)


_OF_BASES = (
    Verb(
        "convert",
        "Convert a base checkpoint between the parameter names of Hugging Face and MindFormers.",
        _convert_options,
    ),
    Verb(
        "quantize",
        "Write a base checkpoint with its linear weights in 4-bit NormalFloat, for QLoRA.",
        _quantize_options,
    ),
    Verb("merge", "Write a base checkpoint with an adapter merged into it.", _merge_options),
)
VERBS = (group("base", "Work on checkpoints of base models: convert, quantize, merge an adapter.", _OF_BASES),)
