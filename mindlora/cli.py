"""The command ``mindlora VERB``: one function per verb, listed in VERBS.

What a verb needs is imported inside its function, so that help and a wrong word on the command line answer at once. A
verb returns its report: a dataclass whose str() is for people, and whose fields ``--json`` prints for programs.
"""
import argparse
import contextlib
import dataclasses
import json
import os
import sys
from typing import Callable, NamedTuple

from mindlora.errors import LoraError


class Verb(NamedTuple):
    """A verb of the command line.

    Attributes:
        name (str): What the user types.
        summary (str): One line for the help.
        add_options (callable): Takes the verb's ArgumentParser; sets ``run`` on it, or on the parsers it adds.
    """
    name: str
    summary: str
    add_options: Callable


@dataclasses.dataclass(frozen=True)
class PluginPath:
    """The answer of plugin-path.

    Attributes:
        path (str): The folder that holds bridge.py.
    """
    path: str

    def __str__(self):
        return self.path


def main(argv=None) -> int:
    """Runs one command line; returns the exit code, 0 only when all was done."""
    arguments = _parser().parse_args(argv)
    try:
        # MindFormers logs to stdout, which is the report's alone.
        with contextlib.redirect_stdout(sys.stderr):
            report = arguments.run(arguments)
    except (LoraError, OSError) as error:
        print(f"mindlora: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(dataclasses.asdict(report), ensure_ascii=False) if arguments.json else report)
    return 0


def _parser():
    parser = argparse.ArgumentParser(prog="mindlora", description="LoRA for MindSpore, native to MindFormers.")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_options(verbs.add_parser(verb.name, help=verb.summary, description=verb.summary))
    return parser


def _add_command(parser, run):
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def _data_options(parser):
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    alpaca = kinds.add_parser("alpaca", help="instruction, input, output: the prompt is masked out of the loss")
    _add_conversion_options(alpaca, "FILE.json|.jsonl")
    alpaca.add_argument("--template", default="alpaca",
                        help=r"alpaca (default), plain, or your own text with {instruction}, {input} and \n for lines")
    alpaca.add_argument("--holdout", type=float, default=0.0, metavar="FRACTION",
                        help="write the last rows, this share of all, to X-heldout.mindrecord")
    alpaca.add_argument("--truncate", action="store_true", help="cut outputs that are too long, not skip their rows")
    alpaca.add_argument("--strict", action="store_true", help="fail, and write nothing, if any row cannot be used")
    alpaca.add_argument("--train-tokenizer", type=int, metavar="VOCAB_SIZE",
                        help="first train a byte-level BPE tokenizer on the input and save it as the folder T")
    _add_command(alpaca, convert_alpaca)
    text = kinds.add_parser("text", help="plain text, packed into full rows, to pretrain on")
    _add_conversion_options(text, "FILE.txt")
    text.add_argument("--paragraphs", action="store_true",
                      help="each paragraph is a document of its own, with bos and eos around it")
    _add_command(text, convert_text)


def _add_conversion_options(parser, input_kind):
    parser.add_argument("--input", required=True, metavar=input_kind)
    parser.add_argument("--output", required=True, metavar="X.mindrecord")
    parser.add_argument("--tokenizer", required=True, metavar="T",
                        help="folder or file: Hugging Face's tokenizer.json, or sentencepiece's tokenizer.model")
    parser.add_argument("--seq-length", required=True, type=int, metavar="N", help="the model's; rows get N + 1 tokens")
    parser.add_argument("--ignore-token-id", type=int, default=-100, metavar="ID",
                        help="the model's label that does not count in the loss (default: -100)")
    parser.add_argument("--overwrite", action="store_true", help="replace what stands at the output")


def convert_alpaca(arguments):
    """mindlora data alpaca"""
    _quiet_transformers()
    from mindlora.plugin import data

    return data.convert_alpaca(
        arguments.input, arguments.output, arguments.tokenizer, arguments.seq_length,
        template=arguments.template.replace("\\n", "\n"), holdout=arguments.holdout, truncate=arguments.truncate,
        strict=arguments.strict, train_vocab_size=arguments.train_tokenizer, ignore_token_id=arguments.ignore_token_id,
        overwrite=arguments.overwrite)


def convert_text(arguments):
    """mindlora data text"""
    _quiet_transformers()
    from mindlora.plugin import data

    return data.convert_text(arguments.input, arguments.output, arguments.tokenizer, arguments.seq_length,
                             paragraphs=arguments.paragraphs, ignore_token_id=arguments.ignore_token_id,
                             overwrite=arguments.overwrite)


def _quiet_transformers():
    # It advises to install PyTorch, which nothing here needs, and to use the class that a tokenizer's model names.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _plugin_path_options(parser):
    _add_command(parser, plugin_path)


def plugin_path(_):
    """mindlora plugin-path"""
    # Found without importing MindFormers: the answer is for a shell's $( ).
    return PluginPath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "plugin", "register_path"))


VERBS = (
    Verb("data", "Turn training data into MindRecord.", _data_options),
    Verb("plugin-path", "Print the folder to give MindFormers' run_mindformer.py as --register_path.",
         _plugin_path_options),
)

if __name__ == "__main__":
    sys.exit(main())
