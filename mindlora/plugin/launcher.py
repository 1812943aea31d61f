"""mindlora-run: MindFormers' run_mindformer.py, which its wheel does not ship, with mindlora loaded."""

import argparse
import contextlib
import os
import sys
from typing import NoReturn, Optional, Sequence

# On few cores, worker threads that spin between kernels cost more than they gain. MindSpore reads this at import.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# On a terminal, MindSpore's warnings would break the progress bar into pieces.
if sys.stdout.isatty() and "--verbose" not in sys.argv:
    os.environ.setdefault("GLOG_v", "3")

import yaml
from mindformers.core.context import build_context
from mindformers.tools.register import ActionDict, MindFormerConfig
from mindformers.tools.utils import parse_value, str2bool, str2bool_or_str
from mindformers.trainer import Trainer
from mindformers.utils.file_utils import set_output_path

from mindlora.common.text import suggestion
from mindlora.errors import ConfigError, LoraError, RunStopped
from mindlora.plugin.run_modes import RUN_MODES, TRAINING_MODES
from mindlora.plugin.screen import progress_only


def true_or_false(text: str) -> bool:
    """Reads a flag with MindFormers' str2bool. argparse quotes the name of this function in its error message."""
    try:
        return str2bool(text)
    except Exception as error:  # str2bool raises nothing narrower
        raise ValueError(text) from error


# MindFormers knows every key of these nodes, and fills in those that the YAML leaves out.
_CLOSED_NODES = ("runner_config", "parallel_config", "recompute_config", "swap_config", "moe_config")

# flag -> (type, key of the YAML that it sets, help). _parser adds the flags that set no single key.
_FLAGS = {
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
    "resume_training": (str2bool_or_str, "resume_training", "resume from a complete checkpoint of CheckpointMonitor"),
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


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command line; returns the exit code.

    0, or with one line on stderr: 1 if the configuration is wrong or the run has failed, 130 or 143 if SIGINT (Ctrl-C)
    or SIGTERM has stopped it.
    """
    try:
        config = build_config(argv)
        quiet = sys.stdout.isatty() and "--verbose" not in (sys.argv if argv is None else argv)
        with progress_only(config) if quiet and config.run_mode in TRAINING_MODES else contextlib.nullcontext():
            run(config)
    except RunStopped as stopped:
        print(f"mindlora-run: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except LoraError as error:
        print(f"mindlora-run: error: {error}", file=sys.stderr)
        return 1
    return 0


def run(config: MindFormerConfig) -> None:
    """Trains, evaluates or predicts as ``config`` says, with mindlora's LoRA, train step and callbacks available."""
    set_output_path(config.output_dir)
    from mindlora.plugin import hooks, preflight  # noqa: F401  importing hooks registers mindlora

    preflight.prepare(config)
    preflight.check_files(config)
    build_context(config)
    trainer = Trainer(config)
    if config.run_mode in TRAINING_MODES:
        trainer.train()
    elif config.run_mode == "eval":
        trainer.evaluate(eval_checkpoint=config.load_checkpoint)
    else:
        trainer.predict(
            predict_checkpoint=config.load_checkpoint,
            input_data=config.input_data,
            batch_size=config.predict_batch_size,
            adapter_id=config.adapter_id,
        )


def build_config(argv: Optional[Sequence[str]] = None) -> MindFormerConfig:
    """Returns the YAML of ``--config``, with every flag and ``--a.b.c value`` of the command line set in it.

    Args:
        argv (sequence of str): The arguments. Default: None, those of this process.

    Raises:
        ConfigError: The YAML cannot be read, a flag is wrong, or an override names a key that the YAML does not have.
    """
    args, rest = _parser().parse_known_args(argv)
    if not os.path.isfile(args.config):
        raise ConfigError(f"--config {args.config} does not exist.")
    if args.register_path is not None:
        register_path = os.path.abspath(args.register_path)
        if not os.path.isdir(register_path):
            raise ConfigError(f"--register_path {args.register_path} is not a folder. Try: $(mindlora plugin-path)")
        os.environ["REGISTER_PATH"] = register_path
        if register_path not in sys.path:
            sys.path.append(register_path)
    config = _read_yaml(args.config, args.run_mode)
    if args.options is not None:
        config.merge_from_dict(args.options)
    for flag, (_, key, _) in _FLAGS.items():
        value = getattr(args, flag)
        if value is not None:
            _set(config, key, value, f"--{flag}", create=True)
    if args.num_samples is not None:
        for dataset in (config.train_dataset, config.eval_dataset):
            if dataset and dataset.data_loader:
                dataset.data_loader.num_samples = args.num_samples
    if args.strategy_load_checkpoint is not None:
        config.parallel.strategy_ckpt_load_file = _strategy_file(args.strategy_load_checkpoint)
    if config.run_mode not in RUN_MODES:
        raise ConfigError(f"run_mode is {config.run_mode!r}, but it must be one of {', '.join(RUN_MODES)}.")
    if config.run_mode == "predict":
        config.input_data = _predict_input(args.predict_data, args.modal_type)
        config.adapter_id = args.adapter_id
    for key, value in _pairs(rest):
        _set(config, key, _value(value), f"--{key}")
    return config


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line like any other error: with one line and exit code 1."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See mindlora-run --help.")


class _Options(ActionDict):
    """MindFormers' key=value pairs. Its own action reads every True as False."""

    def __call__(self, parser, namespace, values, option_string=None):
        for pair in values:
            if "=" not in pair:
                parser.error(f"--options takes key=value pairs, not {pair!r}")
        super().__call__(parser, namespace, values, option_string)
        options = getattr(namespace, self.dest)
        for key, value in (pair.split("=", 1) for pair in values):
            if value.upper() in ("TRUE", "FALSE"):
                options[key] = value.upper() == "TRUE"


def _read_yaml(path, run_mode):
    try:
        return MindFormerConfig(path, **({"run_mode": run_mode} if run_mode else {}))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())
        raise ConfigError(f"--config {path} cannot be read: {reason}") from error


def _parser():
    parser = _Parser(
        prog="mindlora-run",
        description="Train, evaluate or predict as a MindFormers YAML says, with mindlora's LoRA. --a.b.c VALUE "
        "overrides any key of the YAML; a flag followed by a key in parentheses overrides that key.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="the MindFormers YAML to run")
    parser.add_argument("--run_mode", choices=RUN_MODES, help="what to do with the model (run_mode)")
    parser.add_argument("--register_path", help="folder of the modules that auto_register names in the YAML")
    for flag, (kind, key, text) in _FLAGS.items():
        parser.add_argument(f"--{flag}", type=kind, help=f"{text} ({key})")
    parser.add_argument("--num_samples", type=int, help="use only the first rows of the datasets")
    parser.add_argument("--strategy_load_checkpoint", help="parallel strategy: a .ckpt file, or a folder with one")
    parser.add_argument(
        "--predict_data", nargs="+", help="what to predict from: texts, a file, or a folder of pictures"
    )
    parser.add_argument("--modal_type", nargs="+", help="kind of each value of --predict_data: text, image or video")
    parser.add_argument("--adapter_id", nargs="+", help="adapters to predict with, for pet_type slora")
    parser.add_argument("--verbose", action="store_true", help="print MindFormers' log on a terminal too")
    parser.add_argument("--options", nargs="+", action=_Options, help="overrides in the form key=value")
    return parser


def _pairs(rest):
    """Yields (dotted key, value) from ``--a.b.c value`` and ``--a.b.c=value``."""
    words = [part for word in rest for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(words) % 2:
        raise ConfigError(f"Overrides must be pairs of --a.b.c and a value, but these are not: {' '.join(rest)}.")
    for key, value in zip(words[::2], words[1::2]):
        if not key.startswith("--"):
            raise ConfigError(f"Expected a key that starts with --, but got {key!r}: quote a value that has spaces.")
        yield key[2:], value


def _value(text):
    """Reads a value with MindFormers' parse_value, which fails on whole numbers such as 0.0; these become floats."""
    try:
        return parse_value(text)
    except ValueError:
        return float(text)


def _set(config, key, value, source, create=False):
    """Sets the value at a dotted key of the YAML, whose parents must exist; ``source`` begins the error messages."""
    *parents, leaf = key.split(".")
    node = config
    for depth, parent in enumerate(parents):
        if not isinstance(node, dict) or node.get(parent) is None:
            where = ".".join(parents[:depth]) or "the YAML"
            known = ", ".join(sorted(map(str, node))) if isinstance(node, dict) else "nothing"
            raise ConfigError(f"{source}: '{parent}' is not a key of {where}, which has: {known}.")
        node = node[parent]
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {'.'.join(parents)} is {node!r} and has no keys.")
    if not parents and not create and leaf not in node:
        raise ConfigError(f"{source}: '{leaf}' is not a key of the YAML, which has: {', '.join(sorted(node))}.")
    parent = ".".join(parents)
    if parent in _CLOSED_NODES and not create and leaf not in node:
        raise ConfigError(f"{source}: '{leaf}' is not a key of {parent}.{suggestion(leaf, list(node))}")
    node[leaf] = value


def _strategy_file(path):
    if not os.path.isdir(path):
        return path
    files = sorted(name for name in os.listdir(path) if name.endswith(".ckpt"))
    if not files:
        raise ConfigError(f"--strategy_load_checkpoint {path} has no .ckpt file in it: name the file, or its folder.")
    return os.path.join(path, files[0])


def _predict_input(data, modal_types):
    """Returns what Trainer.predict takes: a text, several texts, the pictures of a folder, or a multi-modal query."""
    if data is None:
        return None
    if modal_types is not None:
        if len(data) != len(modal_types):
            raise ConfigError(
                f"--predict_data has {len(data)} values and --modal_type {len(modal_types)}: give each value one type."
            )
        return [[{kind.lower(): value} for value, kind in zip(data, modal_types)]]
    if len(data) > 1:
        return data
    if os.path.isdir(data[0]):
        return [
            os.path.join(folder, name)
            for folder, _, files in os.walk(data[0])
            for name in sorted(files)
            if name.lower().endswith((".jpg", ".jpeg", ".png", ".bmp"))
        ]
    return data[0].replace(r"\n", "\n")


if __name__ == "__main__":
    sys.exit(main())
