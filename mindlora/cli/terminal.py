"""An engine for one user at a terminal: what is said while it starts, and MindFormers' log kept off the screen."""

import argparse
import atexit
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Dict, Iterator

from mindlora.cli.engine_options import Adapters, build, check_config, prepare_imports

if TYPE_CHECKING:
    from mindlora.serving.engine import Engine

_LOG = "mindlora-log-"


def say(text: str) -> None:
    """Prints a line of the command's own to stderr."""
    print(f"mindlora: {text}", file=sys.stderr, flush=True)


def remove_log() -> None:
    """Removes the folder of MindFormers' log, if it is one made here."""
    folder = os.environ.get("LOG_MF_PATH", "")
    if os.path.basename(folder).startswith(_LOG):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def loaded_engine(arguments: argparse.Namespace, adapters: Adapters, defaults: Dict[str, int]) -> Iterator["Engine"]:
    """Builds the engine of a command line, its chosen adapters read and checked; stops it at the end.

    Args:
        arguments (Namespace): With the options of add_engine_options and add_size_options, and ``verbose``.
        adapters (Adapters): See read_adapters.
        defaults (dict): Fields of EngineSettings where the command line gives none.

    Raises:
        LoraError: A setting is wrong, or a file cannot be read.
    """
    check_config(arguments)
    with log_elsewhere(arguments.verbose):
        say(f"loading {arguments.config} ...")
        begin = time.monotonic()
        prepare_imports()
        with _warnings_on_screen():
            engine = build(arguments, adapters.registry, defaults=defaults)
            for name in adapters.chosen:
                engine.adapters.memory.load(name)
            say(f"loaded in {time.monotonic() - begin:.0f} s")
            try:
                yield engine
            finally:
                if engine.alive:
                    engine.stop()


def start(engine: "Engine") -> None:
    """Starts an engine and says how long it took."""
    say("compiling ...")
    begin = time.monotonic()
    engine.start()
    say(f"compiled in {time.monotonic() - begin:.0f} s")


@contextlib.contextmanager
def log_elsewhere(verbose: bool) -> Iterator[None]:
    """Has MindFormers' log written where nobody looks, unless it is asked for (``verbose``)."""
    if verbose:
        yield
        return
    if "LOG_MF_PATH" not in os.environ:
        os.environ["LOG_MF_PATH"] = tempfile.mkdtemp(prefix=_LOG)
        atexit.register(remove_log)
    # Left open, since MindFormers logs to it until the process ends.
    with contextlib.redirect_stdout(open(os.devnull, "w", encoding="utf-8")):  # noqa: SIM115
        yield


@contextlib.contextmanager
def _warnings_on_screen():
    from mindlora.plugin.log import logger

    handler = _Warnings(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Warnings(logging.Handler):
    """Prints mindlora's warnings as its errors are printed."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}")
