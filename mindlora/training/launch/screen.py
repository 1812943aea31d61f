"""The screen of a training run on a terminal: a progress bar and mindlora's messages; a file has the rest."""

import contextlib
import logging
import os
import sys
from typing import Iterator, TextIO

from mindformers.tools.register import MindFormerConfig
from tqdm import tqdm

from mindlora.training.log import logger


class _AboveBar(logging.Handler):
    """Prints messages above the progress bar."""

    def __init__(self, screen: TextIO):
        super().__init__()
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        tqdm.write(f"{mark}{record.getMessage()}", file=self.screen)


@contextlib.contextmanager
def progress_only(config: MindFormerConfig) -> Iterator[None]:
    """Shows a run's progress bar and mindlora's messages; all else that is printed goes to log/screen.log.

    ProgressBar is added to the YAML's callbacks if it is not there.
    """
    callbacks = list(config.callbacks or [])
    if not any(callback.get("type") == "ProgressBar" for callback in callbacks):
        config.callbacks = [*callbacks, MindFormerConfig(type="ProgressBar")]
    path = os.path.join(os.path.realpath(os.path.expanduser(config.output_dir or "output")), "log", "screen.log")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    print(f"MindFormers' log is in {path}; --verbose prints it here.")
    above_bar = _AboveBar(sys.stdout)
    with open(path, "w", encoding="utf-8", buffering=1) as log, contextlib.redirect_stdout(log):
        logger.addHandler(above_bar)
        try:
            yield
        finally:
            logger.removeHandler(above_bar)
