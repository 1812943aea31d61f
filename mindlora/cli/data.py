"""mindlora data, mindlora plugin-path."""

import dataclasses
import os

from mindlora.cli.verb import Verb, add_command


@dataclasses.dataclass(frozen=True)
class PluginPath:
    """The answer of plugin-path.

    Attributes:
        path (str): The folder that holds bridge.py.
    """

    path: str

    def __str__(self):
        return self.path


def _data_options(parser):
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    alpaca = kinds.add_parser("alpaca", help="instruction, input, output: the prompt is masked out of the loss")
    _add_conversion_options(alpaca, "FILE.json|.jsonl")
    alpaca.add_argument(
        "--template",
        default="alpaca",
        help=r"alpaca (default), plain, or your own text with {instruction}, {input} and \n for lines",
    )
    alpaca.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="write the last rows, this share of all, to X-heldout.mindrecord",
    )
    alpaca.add_argument("--truncate", action="store_true", help="cut outputs that are too long, not skip their rows")
    alpaca.add_argument("--strict", action="store_true", help="fail, and write nothing, if any row cannot be used")
    alpaca.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB_SIZE",
        help="first train a byte-level BPE tokenizer on the input and save it as the folder T",
    )
    add_command(alpaca, convert_alpaca)
    text = kinds.add_parser("text", help="plain text, packed into full rows, to pretrain on")
    _add_conversion_options(text, "FILE.txt")
    text.add_argument(
        "--paragraphs", action="store_true", help="each paragraph is a document of its own, with bos and eos around it"
    )
    add_command(text, convert_text)


def _add_conversion_options(parser, input_kind):
    parser.add_argument("--input", required=True, metavar=input_kind)
    parser.add_argument("--output", required=True, metavar="X.mindrecord")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="folder or file: Hugging Face's tokenizer.json, or sentencepiece's tokenizer.model",
    )
    parser.add_argument("--seq-length", required=True, type=int, metavar="N", help="the model's; rows get N + 1 tokens")
    parser.add_argument(
        "--ignore-token-id",
        type=int,
        default=-100,
        metavar="ID",
        help="the model's label that does not count in the loss (default: -100)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what stands at the output")


def convert_alpaca(arguments):
    """mindlora data alpaca"""
    _quiet_transformers()
    from mindlora.data import instruction_data

    return instruction_data.convert_alpaca(
        arguments.input,
        arguments.output,
        arguments.tokenizer,
        arguments.seq_length,
        template=arguments.template.replace("\\n", "\n"),
        holdout=arguments.holdout,
        truncate=arguments.truncate,
        strict=arguments.strict,
        train_vocab_size=arguments.train_tokenizer,
        ignore_token_id=arguments.ignore_token_id,
        overwrite=arguments.overwrite,
    )


def convert_text(arguments):
    """mindlora data text"""
    _quiet_transformers()
    from mindlora.data import instruction_data

    return instruction_data.convert_text(
        arguments.input,
        arguments.output,
        arguments.tokenizer,
        arguments.seq_length,
        paragraphs=arguments.paragraphs,
        ignore_token_id=arguments.ignore_token_id,
        overwrite=arguments.overwrite,
    )


def _quiet_transformers():
    # It advises to install PyTorch, which nothing here needs, and to use the class that a tokenizer's model names.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _plugin_path_options(parser):
    add_command(parser, plugin_path)


def plugin_path(_):
    """mindlora plugin-path"""
    # Found without importing MindFormers: the answer is for a shell's $( ).
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return PluginPath(os.path.join(package, "plugin", "register_path"))


VERBS = (
    Verb("data", "Turn training data into MindRecord.", _data_options),
    Verb(
        "plugin-path",
        "Print the folder to give MindFormers' run_mindformer.py as --register_path.",
        _plugin_path_options,
    ),
)
