"""The flags of mindlora-run. Imports no MindFormers, so that --help and a wrong flag are answered at once."""

import argparse
from typing import List, NoReturn, Optional, Sequence, Tuple, Union

from mindlora import __version__
from mindlora.common.run_modes import RUN_MODES
from mindlora.errors import ConfigError


def true_or_false(text: str) -> bool:
    """Reads a flag that is True or False. argparse quotes the name of this function in its error message."""
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def true_false_or_name(text: str) -> Union[bool, str]:
    """Reads a flag that is True, False or the name of a file."""
    return {"true": True, "false": False}.get(text.lower(), text)


# flag -> (type, key of the YAML that it sets, help). parse adds the flags that set no single key.
FLAGS = {
    "mode": (int, "context.mode", "0 for graph mode, 1 for PyNative mode"),
    "device_id": (int, "context.device_id", "device to run on"),
    "device_target": (str, "context.device_target", "Ascend or CPU"),
    "do_eval": (true_or_false, "do_eval", "evaluate while training"),
    "seed": (int, "seed", "random seed"),
    "use_parallel": (true_or_false, "use_parallel", "run on several devices, under msrun"),
    "load_checkpoint": (str, "load_checkpoint", "checkpoint of the base: a file or a folder"),
    "src_strategy_path_or_dir": (
        str,
        "src_strategy_path_or_dir",
        "parallel strategy of load_checkpoint: a file or a folder",
    ),
    "auto_trans_ckpt": (
        true_or_false,
        "auto_trans_ckpt",
        "transform load_checkpoint to the parallel layout of this run",
    ),
    "transform_process_num": (int, "transform_process_num", "number of processes that transform the checkpoint"),
    "only_save_strategy": (true_or_false, "only_save_strategy", "save the parallel strategy and stop"),
    "resume_training": (
        true_false_or_name,
        "resume_training",
        "resume from a complete checkpoint of CheckpointMonitor; what LoraCheckpoint saved is resumed with --resume",
    ),
    "remote_save_url": (str, "remote_save_url", "URL to copy the output to"),
    "profile": (true_or_false, "profile", "profile the run"),
    "train_dataset_dir": (
        str,
        "train_dataset.data_loader.dataset_dir",
        "training data: a MindRecord, or a folder of them",
    ),
    "eval_dataset_dir": (
        str,
        "eval_dataset.data_loader.dataset_dir",
        "evaluation data: a MindRecord, or a folder of them",
    ),
    "do_sample": (true_or_false, "model.model_config.do_sample", "predict by sampling"),
    "epochs": (int, "runner_config.epochs", "number of epochs"),
    "batch_size": (int, "runner_config.batch_size", "rows in a batch on each device"),
    "gradient_accumulation_steps": (
        int,
        "runner_config.gradient_accumulation_steps",
        "batches whose gradients are added up before an update",
    ),
    "sink_mode": (true_or_false, "runner_config.sink_mode", "data sinking: feed several steps to the device at once"),
    "output_dir": (str, "output_dir", "folder to write to"),
    "trust_remote_code": (true_or_false, "trust_remote_code", "allow a Hugging Face tokenizer to run its own code"),
    "predict_batch_size": (int, "predict_batch_size", "texts in a batch when predicting"),
}


def parse(argv: Optional[Sequence[str]] = None) -> Tuple[argparse.Namespace, List[str]]:
    """Returns the flags, and all other words: overrides such as ``--a.b.c value``.

    Args:
        argv (sequence of str): The arguments. Default: None, those of this process.

    Raises:
        ConfigError: A flag is wrong.
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
    for flag, (kind, key, text) in FLAGS.items():
        parser.add_argument(f"--{flag}", type=kind, help=f"{text} ({key})")
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
