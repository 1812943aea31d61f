"""The flags of mindlora-run. Imports no MindFormers, so that --help and a wrong flag are answered at once."""

import argparse
from typing import List, NoReturn, Optional, Sequence, Tuple

from mindlora import __version__
from mindlora.core.errors import ConfigError
from mindlora.core.overrides import FLAGS
from mindlora.core.run_modes import RUN_MODES


def parse(argv: Optional[Sequence[str]] = None) -> Tuple[argparse.Namespace, List[str]]:
    """Returns the flags, and all other words: overrides such as ``--a.b.c value``; raises ConfigError for a wrong flag.

    None stands for this process's arguments.
    """
    args, rest = _parser().parse_known_args(argv)
    for pair in args.options or ():
        if "=" not in pair:
            raise ConfigError(f"--options takes key=value pairs, not {pair!r}. See mindlora-run --help.")
    return args, rest


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line like any other error: with one line and exit code 1."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See mindlora-run --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mindlora-run",
        description="Train, evaluate or predict as a MindFormers YAML says, with mindlora's LoRA. --a.b.c VALUE "
        "overrides any key of the YAML, where an item of a list is named by its number or its type "
        "(--callbacks.LoraCheckpoint.save_steps 50); a flag followed by a key in parentheses overrides that key.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mindlora {__version__}")
    parser.add_argument("--config", required=True, help="the MindFormers YAML to run")
    parser.add_argument("--run_mode", choices=RUN_MODES, help="what to do with the model (run_mode)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="STEP_FOLDER",
        help="go on with a run that LoraCheckpoint saved: from the newest step in its folder, or from the one named",
    )
    parser.add_argument("--register_path", help="folder of the modules that auto_register names in the YAML")
    for name, flag in FLAGS.items():
        parser.add_argument(f"--{name}", type=flag.kind, help=f"{flag.help} ({flag.key})")
    parser.add_argument("--num_samples", type=int, help="use only the first rows of the datasets")
    parser.add_argument("--strategy_load_checkpoint", help="parallel strategy: a .ckpt file, or a folder with one")
    parser.add_argument(
        "--predict_data", nargs="+", help="what to predict from: texts, a file, or a folder of pictures"
    )
    parser.add_argument("--modal_type", nargs="+", help="kind of each value of --predict_data: text, image or video")
    parser.add_argument("--adapter_id", nargs="+", help="adapters to predict with, for pet_type slora")
    parser.add_argument(
        "--random_base", action="store_true", help="predict or evaluate without load_checkpoint, on random weights"
    )
    parser.add_argument("--verbose", action="store_true", help="print MindFormers' log on a terminal too")
    parser.add_argument("--options", nargs="+", help="overrides in the form key=value")
    return parser
