"""mindlora data: training data to MindRecord."""

import argparse
from typing import TYPE_CHECKING

from mindlora.cli.verb import Verb, add_command, quiet_transformers
from mindlora.core.errors import DataError
from mindlora.core.fields import IGNORE_TOKEN_ID

if TYPE_CHECKING:
    from mindlora.data.conversion import DataReport


def _data_options(parser):
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", required=True)
    alpaca = kinds.add_parser(
        "alpaca", help="rows of instruction, input and output; the prompt is masked out of the loss"
    )
    _add_inputs(alpaca, "instruction, input, output")
    _add_conversion_options(alpaca)
    alpaca.add_argument(
        "--template",
        default="alpaca",
        help=r"prompt template: alpaca (default), plain, or a text with {instruction}, {input} and \n for a new line",
    )
    _add_example_options(alpaca)
    add_command(alpaca, _convert_alpaca)
    chat = kinds.add_parser(
        "chat", help="conversations (ShareGPT, OpenAI); only what the assistant says counts in the loss"
    )
    _add_inputs(chat, "messages, system, tools")
    _add_conversion_options(chat)
    _add_chat_template(chat)
    _add_example_options(chat)
    add_command(chat, _convert_chat)
    preference = kinds.add_parser(
        "preference",
        help="preferences (TRL, LLaMA-Factory, Anthropic, UltraFeedback): pairs of answers, or judged ones",
    )
    _add_inputs(preference, "prompt, chosen, rejected, completion, label, messages, completions, system, tools")
    _add_conversion_options(preference)
    _add_chat_template(preference)
    _add_example_options(preference)
    add_command(preference, _convert_preference)
    _add_labels(kinds)
    text = kinds.add_parser("text", help="plain text to pretrain on, packed into full rows")
    text.add_argument("--input", required=True, metavar="FILE.txt", help="the file to convert")
    _add_conversion_options(text)
    text.add_argument(
        "--paragraphs", action="store_true", help="make each paragraph a document, with bos and eos around it"
    )
    add_command(text, _convert_text)


def _add_labels(kinds):
    labels = kinds.add_parser("labels", help="labeled texts, or words with a tag each, for a classifier")
    _add_inputs(labels, "text, label, tokens, tags")
    _add_conversion_options(labels)
    labels.add_argument(
        "--labels",
        metavar="A,B,...",
        help="names of the labels in the order of their numbers (default: all that occur, sorted)",
    )
    _add_example_options(labels)
    add_command(labels, _convert_labels)


def _add_chat_template(parser):
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="chat template in Jinja, for a tokenizer that has none, or instead of its own",
    )


def _add_inputs(parser, fields):
    """Adds the options for inputs of all kinds except text; _example_settings reads all except --input."""
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        action="extend",
        metavar="PATH",
        help="JSON, JSON Lines, CSV or Parquet, also as .gz or .zst; a folder of such files; a dataset of save_to_disk",
    )
    parser.add_argument(
        "--columns",
        action="append",
        default=[],
        metavar="FIELD=COLUMN,...",
        help=f"columns of the input that have another name than their field ({fields}); give it once for all inputs, "
        "or once for each",
    )
    parser.add_argument("--split", metavar="NAME", help="which split of a dataset of save_to_disk to read")
    parser.add_argument(
        "--weights",
        metavar="W,W,...",
        help="shares of the rows to draw from several inputs, such as 0.7,0.3; no row is repeated (default: all rows)",
    )


def _add_conversion_options(parser):
    parser.add_argument("--output", required=True, metavar="X.mindrecord", help="the MindRecord to write")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="tokenizer: a folder or file, Hugging Face's tokenizer.json or sentencepiece's tokenizer.model",
    )
    parser.add_argument(
        "--seq-length", required=True, type=int, metavar="N", help="seq_length of the model; rows get N + 1 tokens"
    )
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="VOCAB_SIZE",
        help="first train a byte-level BPE tokenizer of this size on the input and save it in the folder T",
    )
    parser.add_argument(
        "--train-tokenizer-on",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE.txt",
        help="with --train-tokenizer: plain texts to train it on besides the input, such as the base's",
    )
    parser.add_argument(
        "--base",
        metavar="PATH",
        help="checkpoint that will train on the rows: warn if its vocabulary is not the tokenizer's",
    )
    parser.add_argument(
        "--ignore-token-id",
        type=int,
        default=IGNORE_TOKEN_ID,
        metavar="ID",
        help="ignore_token_id of the model, the label that does not count in the loss (default: -100)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing output files")


def _add_example_options(parser):
    """Adds the common options of all kinds except text; _example_settings reads them."""
    parser.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="share of the rows, drawn by --seed, to write to X-heldout.mindrecord instead (default: 0)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="what is drawn depends on it (default: 0)")
    parser.add_argument("--truncate", action="store_true", help="cut rows that are too long instead of skipping them")
    parser.add_argument("--strict", action="store_true", help="write nothing and fail if any row cannot be used")
    parser.add_argument(
        "--pack",
        action="store_true",
        help="put many examples into a row, which LoraTrainOneStepCell keeps apart: little padding, the same loss",
    )
    parser.add_argument(
        "--actual-seq-len",
        action="store_true",
        help="with --pack: add the column actual_seq_len, for use_eod_attn_mask_compression on Ascend",
    )
    parser.add_argument(
        "--stats",
        nargs="?",
        const=True,
        default=False,
        metavar="PNG",
        help="print the lengths of the examples and the share of padding; with a file, draw a histogram too",
    )


def _conversion(arguments):
    """Returns the first arguments of each conversion."""
    return arguments.input, arguments.output, arguments.tokenizer, arguments.seq_length


def _conversion_settings(arguments):
    """Returns the other settings of _add_conversion_options."""
    return {
        "train_vocab_size": arguments.train_tokenizer,
        "train_texts": arguments.train_tokenizer_on,
        "base": arguments.base,
        "ignore_token_id": arguments.ignore_token_id,
        "overwrite": arguments.overwrite,
    }


def _example_settings(arguments):
    names = ("split", "holdout", "seed", "truncate", "strict", "pack", "actual_seq_len", "stats")
    return {
        "columns": [_parse_columns(text) for text in arguments.columns],
        "weights": _parse_weights(arguments.weights),
        **{name: getattr(arguments, name) for name in names},
        **_conversion_settings(arguments),
    }


def _parse_columns(text):
    """Returns {field: column} for ``field=column,...``; an empty text keeps all names."""
    pairs = [part.split("=", 1) for part in text.split(",")] if text else []
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise DataError(f"--columns {text}: write FIELD=COLUMN, and a comma between two of them.")
    return dict(pairs)


def _parse_weights(text):
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise DataError(f"--weights {text}: write numbers with commas between them, such as 0.7,0.3.") from error


def _convert_alpaca(arguments: argparse.Namespace) -> "DataReport":
    quiet_transformers()
    from mindlora.data import alpaca

    return alpaca.convert_alpaca(
        *_conversion(arguments), template=arguments.template.replace("\\n", "\n"), **_example_settings(arguments)
    )


def _convert_chat(arguments: argparse.Namespace) -> "DataReport":
    quiet_transformers()
    from mindlora.data import chat

    return chat.convert_chat(
        *_conversion(arguments), chat_template=arguments.chat_template, **_example_settings(arguments)
    )


def _convert_preference(arguments: argparse.Namespace) -> "DataReport":
    quiet_transformers()
    from mindlora.training.preference import conversion as preference

    return preference.convert_preference(
        *_conversion(arguments), chat_template=arguments.chat_template, **_example_settings(arguments)
    )


def _convert_labels(arguments: argparse.Namespace) -> "DataReport":
    quiet_transformers()
    from mindlora.training.classifier import conversion as labels

    names = arguments.labels.split(",") if arguments.labels else None
    return labels.convert_labels(*_conversion(arguments), label_names=names, **_example_settings(arguments))


def _convert_text(arguments: argparse.Namespace) -> "DataReport":
    quiet_transformers()
    from mindlora.data import text

    return text.convert_text(
        *_conversion(arguments), paragraphs=arguments.paragraphs, **_conversion_settings(arguments)
    )


VERBS = (Verb("data", "Convert training data to MindRecord.", _data_options),)
