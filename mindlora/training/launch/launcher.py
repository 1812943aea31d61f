"""mindlora-run: the equivalent of MindFormers' run_mindformer.py, which its wheel lacks, with mindlora loaded."""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

# On few cores, worker threads that spin between kernels cost more than they gain. MindSpore reads this at import.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# On a terminal, MindSpore's warnings would break the progress bar into pieces.
if sys.stdout.isatty() and "--verbose" not in sys.argv:
    os.environ.setdefault("GLOG_v", "3")

import yaml

from mindlora.core.errors import ConfigError, LoraError, RunStopped
from mindlora.core.interrupts import Interrupts
from mindlora.core.overrides import keys_and_texts, set_flags, set_keys
from mindlora.core.yaml_file import TRAINING_MODES, read_merged
from mindlora.run.checks.finding import refuse
from mindlora.training.launch.command_line import parse
from mindlora.training.launch.imports import import_mindformers

# MindFormers takes seconds to import, and --help does not need it, so the functions below import it. They also import
# the modules that need NumPy, which starts threads: Ctrl-C is blocked only in threads that start after Interrupts is
# entered.
if TYPE_CHECKING:
    from mindformers.tools.register import MindFormerConfig


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs one command line; returns the exit code.

    The code is 0, or, with one line on stderr, 1 if the configuration is wrong or the run failed, and 130 or 143 if
    SIGINT (Ctrl-C) or SIGTERM stopped it. Whenever a training run ends before its last step, a line says how to resume
    it.
    """
    began = time.time()
    config = None
    try:
        with _interrupts(lambda: _say_how_to_go_on(config, began)):
            config, run_it = _pynative_run(argv) or (build_config(argv), run)
            quiet = sys.stdout.isatty() and "--verbose" not in (sys.argv if argv is None else argv)
            with _screen(config) if quiet and _trains(config) else contextlib.nullcontext():
                run_it(config)
    except RunStopped as stopped:
        print(f"mindlora-run: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except LoraError as error:
        print(f"mindlora-run: error: {error}", file=sys.stderr)
        _say_how_to_go_on(config, began)
        return 1
    except KeyboardInterrupt:
        print("mindlora-run: interrupted", file=sys.stderr)
        _say_how_to_go_on(config, began)
        return 130
    except Exception as error:
        from mindlora.training.launch.screen import described

        print(f"mindlora-run: error: {described(error, config)}", file=sys.stderr)
        _say_how_to_go_on(config, began)
        return 1
    except BaseException:
        _say_how_to_go_on(config, began)
        raise
    return 0


def _pynative_run(argv) -> Optional[Tuple[Dict, Callable]]:
    """Returns a PyNative Trainer YAML's content, and the function that trains it; None for any other YAML."""
    from mindlora.training.launch import pynative_run

    try:
        args, rest = parse(argv)
    except ConfigError:
        return None  # build_config says what is wrong with the flags.
    if not pynative_run.is_for_pynative(args.config):
        return None
    _use_register_path(args.register_path)
    return pynative_run.build_config(args, rest), pynative_run.train


def _trains(config):
    # A YAML of the PyNative Trainer may lack the key.
    return config.get("run_mode", "train") in TRAINING_MODES


def run(config: "MindFormerConfig") -> None:
    """Trains, evaluates or predicts according to ``config``, with mindlora's LoRA, train step and callbacks."""
    random_base = config.pop("random_base", False)
    prepare(config, random_base)
    start(config)


def prepare(config: "MindFormerConfig", random_base: bool = False) -> None:
    """Registers mindlora, checks a run's configuration, and fills in derived settings, in place."""
    from mindlora.training.launch.launch_checks import check_launch

    check_launch(config, random_base)
    from mindformers.utils.file_utils import set_output_path

    set_output_path(config.output_dir)
    from mindlora.training.launch import (
        hooks,  # noqa: F401  importing hooks registers mindlora
        preflight,
    )

    preflight.prepare(config)
    preflight.refuse_missing_files(config)


def start(config: "MindFormerConfig") -> None:
    """Trains, evaluates or predicts according to a prepared configuration."""
    from mindformers.core.context import build_context
    from mindformers.trainer import Trainer

    from mindlora.network.graph_cache import VARIABLE, keep_in_home
    from mindlora.training.launch.preflight import take_base_over

    build_context(config)
    keep_in_home(lambda line: print(f"mindlora-run: {line}", file=sys.stderr), f"{VARIABLE}=")
    without_values = take_base_over(config)
    trainer = Trainer(config)
    if config.run_mode in TRAINING_MODES:
        with without_values:
            trainer.train()
    elif config.run_mode == "eval":
        trainer.evaluate(eval_checkpoint=config.load_checkpoint)
    else:
        if config.save_file is None:
            # Otherwise, MindFormers writes it into the working folder.
            os.makedirs(config.output_dir, exist_ok=True)
            config.save_file = os.path.join(config.output_dir, "predict_result.txt")
        trainer.predict(
            predict_checkpoint=config.load_checkpoint,
            input_data=config.input_data,
            batch_size=config.predict_batch_size,
            adapter_id=config.adapter_id,
        )


def build_config(argv: Optional[Sequence[str]] = None) -> "MindFormerConfig":
    """Returns the YAML of ``--config``, with every flag and ``--a.b.c value`` of the command line set in it.

    Raises ConfigError if the YAML cannot be read, a flag is wrong, or an override names a key that the YAML lacks, and
    InstallationError if MindFormers cannot be imported.
    """
    args, rest = parse(argv)
    if not os.path.isfile(args.config):
        raise ConfigError(f"--config {args.config} does not exist. Check the path.")
    _use_register_path(args.register_path)
    import_mindformers()
    config = _read_yaml(args.config, args.run_mode)
    _override(config, args, rest)
    from mindlora.run.checks.key_ranges import check_run_mode, check_shape
    from mindlora.run.yaml_run import YamlRun

    run = YamlRun(config)
    refuse([*check_shape(run), *check_run_mode(run)])
    if config.run_mode == "predict":
        config.input_data = _predict_input(args.predict_data, args.modal_type)
        config.adapter_id = args.adapter_id
    if args.resume is not None:
        _resume(config, args.resume)
    if args.random_base:
        config.random_base = True
    return config


def _use_register_path(folder):
    """Makes MindFormers look in a folder for the modules that auto_register names; None means no folder."""
    if folder is None:
        return
    register_path = os.path.abspath(folder)
    if not os.path.isdir(register_path):
        raise ConfigError(f"--register_path {folder} is not a folder. Try: $(mindlora plugin-path)")
    os.environ["REGISTER_PATH"] = register_path
    if register_path not in sys.path:
        sys.path.append(register_path)


def _override(config, args, rest):
    """Applies the command line's overrides: --options, then the flags, then ``--a.b.c value``."""
    if args.options is not None:
        config.merge_from_dict(_options(args.options))
    set_flags(config, vars(args))
    if args.num_samples is not None:
        for dataset in (config.train_dataset, config.eval_dataset):
            if dataset and dataset.data_loader:
                dataset.data_loader.num_samples = args.num_samples
    if args.strategy_load_checkpoint is not None:
        config.parallel.strategy_ckpt_load_file = _strategy_file(args.strategy_load_checkpoint)
    pairs = list(keys_and_texts(rest))
    set_keys(config, pairs)
    _fill_nodes(config, [key for key, _ in pairs])


def _fill_nodes(config, keys):
    """Fills in complete nodes set on the command line, as MindFormers does for a YAML's nodes."""
    from mindformers.tools.register import MindFormerConfig
    from mindformers.tools.register.template import CONFIG_NAME_TO_CLASS

    for key in keys:
        if isinstance(config.get(key), dict) and key in CONFIG_NAME_TO_CLASS:
            # The checks report what the node lacks.
            with contextlib.suppress(KeyError, ValueError):
                config[key] = MindFormerConfig(**CONFIG_NAME_TO_CLASS[key].apply(config[key]))


def _options(pairs: List[str]) -> dict:
    """Parses key=value pairs with MindFormers' own action, which reads every True as False."""
    from mindformers.tools.register import ActionDict

    namespace = argparse.Namespace()
    ActionDict(["--options"], "options")(None, namespace, pairs)
    for key, value in (pair.split("=", 1) for pair in pairs):
        if value.upper() in ("TRUE", "FALSE"):
            namespace.options[key] = value.upper() == "TRUE"
    return namespace.options


def _resume(config, step_folder):
    """Applies --resume to LoraCheckpoint."""
    saving = [callback for callback in config.callbacks or [] if callback.get("type") == "LoraCheckpoint"]
    if config.run_mode not in TRAINING_MODES or not saving:
        obstacle = f"run_mode is {config.run_mode}" if saving else "callbacks has no LoraCheckpoint"
        raise ConfigError(
            f"--resume continues a training run that LoraCheckpoint saved, but {obstacle}. Train with "
            "LoraCheckpoint, or leave --resume out."
        )
    saving[0]["resume"] = step_folder


def _interrupts(clean_up: Callable[[], None]) -> contextlib.AbstractContextManager:
    """Returns a context that ends the process with one line on Ctrl-C, except in training, where GracefulStop does."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual and threading.current_thread() is threading.main_thread():
        return Interrupts("mindlora-run", clean_up)
    return contextlib.nullcontext()


def _say_how_to_go_on(config, began):
    """Prints the newest step that this run saved, and how to resume from it."""
    if config is None or not _trains(config):
        return
    for folder in _last_steps(config):
        if os.path.getmtime(folder) >= began:
            print(
                f"mindlora-run: saved in {folder}. To resume from there, repeat the command with --resume.",
                file=sys.stderr,
            )
            return


def _last_steps(config) -> Iterator[str]:
    """Yields the last step in each folder where a run saves."""
    from mindlora.run.checks.pynative import is_pynative
    from mindlora.training.launch.pynative_run import saved_step

    if is_pynative(config):
        step = saved_step(config)
        if step is not None:
            yield step
        return
    from mindlora.training.resume.training_state import checkpoint_directory, step_folders

    callbacks = list(config.callbacks or [])
    for each in config.callbacks or []:
        # With several adapters, each has its own callbacks.
        callbacks += [callback for run in each.get("runs") or [] for callback in run["configuration"]["callbacks"]]
    for callback in callbacks:
        if callback.get("type") == "LoraCheckpoint":
            yield from step_folders(checkpoint_directory(callback.get("directory")))[-1:]


def _screen(config) -> contextlib.AbstractContextManager:
    from mindlora.training.launch.screen import progress_only

    return progress_only(config)


def _read_yaml(path, run_mode):
    from mindformers.tools.register import MindFormerConfig

    try:
        return MindFormerConfig(path, **({"run_mode": run_mode} if run_mode else {}))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        reason = _reason(path, run_mode, error).rstrip(".")
        raise ConfigError(f"--config {path} cannot be read: {reason}. Correct the YAML.") from error


def _reason(path, run_mode, error):
    """Returns why MindFormers cannot read a YAML; its own error names neither the node nor the intended key."""
    try:
        config = {**read_merged(path), **({"run_mode": run_mode} if run_mode else {})}
    except ConfigError:
        config = {}
    from mindlora.run.checks.key_ranges import check_names, check_shape
    from mindlora.run.yaml_run import YamlRun

    refuse(check_shape(YamlRun(config)))
    named = " ".join(map(str, check_names(YamlRun(config))))
    return named or " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split())


def _strategy_file(path):
    if not os.path.isdir(path):
        return path
    files = sorted(name for name in os.listdir(path) if name.endswith(".ckpt"))
    if not files:
        raise ConfigError(f"--strategy_load_checkpoint {path} has no .ckpt file in it: name the file, or its folder.")
    return os.path.join(path, files[0])


def _predict_input(data, modal_types):
    """Returns the input for Trainer.predict: one or several texts, a folder's pictures, or a multi-modal query."""
    if data is None:
        return None
    if modal_types is not None:
        if len(data) != len(modal_types):
            raise ConfigError(
                f"--predict_data has {len(data)} values and --modal_type {len(modal_types)}: give each value one type."
            )
        return [[{kind.lower(): value} for value, kind in zip(data, modal_types)]]
    if len(data) > 1:
        return [_text(value) for value in data]
    if os.path.isdir(data[0]):
        return [
            os.path.join(folder, name)
            for folder, _, files in os.walk(data[0])
            for name in sorted(files)
            if name.lower().endswith((".jpg", ".jpeg", ".png", ".bmp"))
        ]
    return _text(data[0])


def _text(value: str) -> str:
    """Returns the text with a newline for each \\n, which a shell passes as two characters."""
    return value.replace(r"\n", "\n")


if __name__ == "__main__":
    sys.exit(main())
