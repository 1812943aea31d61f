"""The flags of mindlora-run. Does not import MindFormers, so that --help and errors in flags appear at once."""

import argparse
from typing import List, NoReturn, Optional, Sequence, Tuple

from mindlora import __version__
from mindlora.core.errors import ConfigError
from mindlora.core.overrides import FLAGS
from mindlora.core.yaml_file import RUN_MODES

# The most common of FLAGS, for the beginning of --help.
_FIRST = (
    *("train_dataset_dir", "eval_dataset_dir", "load_checkpoint", "output_dir"),
    *("epochs", "batch_size", "gradient_accumulation_steps", "use_parallel", "device_target"),
)


def parse(argv: Optional[Sequence[str]] = None) -> Tuple[argparse.Namespace, List[str]]:
    """Returns the flags, and all other words, which are overrides; raises ConfigError for a wrong flag.

    An override is like ``--a.b.c value``. None means this process's arguments.
    """
    args, rest = _parser().parse_known_args(argv)
    for pair in args.options or ():
        if "=" not in pair:
            raise ConfigError(f"--options takes key=value pairs, not {pair!r}. See mindlora-run --help.")
    return args, rest


class _Parser(argparse.ArgumentParser):
    """A parser that reports a wrong command line like any other error: in one line, with exit code 1."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See mindlora-run --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mindlora-run",
        usage="mindlora-run --config YAML [--option VALUE ...] [--a.b.c VALUE ...]",
        description="Train, evaluate or predict as a MindFormers YAML says, with mindlora's LoRA. --a.b.c VALUE "
        "overrides any key of the YAML, where an item of a list is named by its number or its type "
        "(--callbacks.LoraCheckpoint.save_steps 50).",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mindlora {__version__}")
    parser.add_argument("--config", required=True, metavar="YAML", help="the MindFormers YAML to run")
    parser.add_argument("--run_mode", choices=RUN_MODES, help="what to do with the model")
    _add_flags(parser, _FIRST)
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="STEP_FOLDER",
        help="resume a saved run, from the newest step in its folder or from a given step folder",
    )
    parser.add_argument(
        "--predict_data",
        nargs="+",
        metavar="DATA",
        help="the input of a prediction: texts, a file, or a folder of pictures",
    )
    parser.add_argument(
        "--modal_type", nargs="+", metavar="KIND", help="kind of each value of --predict_data: text, image or video"
    )
    parser.add_argument("--adapter_id", nargs="+", metavar="ID", help="adapters to predict with, for pet_type slora")
    parser.add_argument(
        "--random_base", action="store_true", help="predict or evaluate without load_checkpoint, on random weights"
    )
    parser.add_argument("--num_samples", type=int, metavar="N", help="use only the first rows of the datasets")
    parser.add_argument(
        "--register_path", metavar="FOLDER", help="folder of the modules that auto_register names in the YAML"
    )
    parser.add_argument(
        "--strategy_load_checkpoint", metavar="PATH", help="parallel strategy: a .ckpt file, or a folder with one"
    )
    parser.add_argument("--verbose", action="store_true", help="print MindFormers' log on a terminal too")
    parser.add_argument("--options", nargs="+", metavar="KEY=VALUE", help="overrides in the form key=value")
    rest = parser.add_argument_group(
        "set a key of the YAML",
        "Each of these flags of run_mindformer.py sets one key: the key of the same name, or the key in parentheses.",
    )
    _add_flags(rest, [name for name in FLAGS if name not in _FIRST])
    return parser


def _add_flags(parser: argparse._ActionsContainer, names: Sequence[str]) -> None:
    """Adds flags of FLAGS to a parser or one of its groups; their help names the key they set, if it differs."""
    for name in names:
        flag = FLAGS[name]
        key = "" if flag.key == name else f" ({flag.key})"
        parser.add_argument(f"--{name}", type=flag.kind, metavar="VALUE", help=f"{flag.help}{key}")
