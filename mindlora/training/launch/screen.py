"""The terminal output of a training run: a progress bar and mindlora's messages; a file has the rest."""

import contextlib
import logging
import os
import sys
import traceback
from typing import Any, Dict, Iterator, Mapping, Optional, TextIO

from mindformers.tools.utils import get_real_rank
from tqdm import tqdm

from mindlora.training.log import logger

# The end of a run that fails in MindFormers or MindSpore: one line, and the traceback in a file.

# MindSpore's messages continue with sources, graphs and C++ frames.
_LONGEST = 400


def described(error: Exception, config: Optional[Mapping[str, Any]]) -> str:
    """Returns a one-line description of an error, and writes its traceback to a file in the run's output folder.

    The configuration is None if the error came before it was read.
    """
    return f"the run ended with {type(error).__name__}: {sentence(error)} {_keep_traceback(error, config)}"


def sentence(error: BaseException) -> str:
    """Returns the first meaningful line of an error's message, shortened, with a full stop."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line.strip("-")), "no message")
    shortened = first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
    return shortened if shortened.endswith((".", "!", "?")) else f"{shortened}."


def _keep_traceback(error: Exception, config: Optional[Mapping[str, Any]]) -> str:
    """Returns a sentence with the file that holds the traceback, or the traceback itself if it cannot be written."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    output = str((config or {}).get("output_dir") or "output")
    folder = os.path.join(os.path.realpath(os.path.expanduser(output)), "log", f"rank_{get_real_rank()}")
    path = os.path.join(folder, "traceback.txt")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return f"The traceback:\n{text}"
    return f"The traceback is in {path}."


class _AboveBar(logging.Handler):
    """A log handler that prints messages above the progress bar."""

    def __init__(self, screen: TextIO):
        super().__init__()
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        tqdm.write(f"{mark}{record.getMessage()}", file=self.screen)


@contextlib.contextmanager
def progress_only(config: Dict[str, Any]) -> Iterator[None]:
    """Shows a run's progress bar and mindlora's messages; all other output goes to log/screen.log.

    Adds ProgressBar to the YAML's callbacks if it is missing.
    """
    callbacks = list(config.get("callbacks") or [])
    if not any(callback.get("type") == "ProgressBar" for callback in callbacks):
        config["callbacks"] = [*callbacks, type(config)(type="ProgressBar")]
    output = os.path.realpath(os.path.expanduser(config.get("output_dir") or "output"))
    path = os.path.join(output, "log", "screen.log")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    print(f"MindFormers' log is in {path}; --verbose prints it here.")
    screen = sys.stdout
    above_bar = _AboveBar(screen)
    with open(path, "w", encoding="utf-8", buffering=1) as log, contextlib.redirect_stdout(log):
        # A message at import, a warning for example, has bound MindFormers' log to the screen.
        bound = [handler for handler in _stream_handlers() if handler.stream is screen]
        for handler in bound:
            handler.setStream(log)
        logger.addHandler(above_bar)
        try:
            yield
        finally:
            logger.removeHandler(above_bar)
            for handler in bound:
                handler.setStream(screen)


def _stream_handlers() -> Iterator[logging.StreamHandler]:
    """Yields the handlers of all logs that write to a stream."""
    for log in list(logging.root.manager.loggerDict.values()):
        for handler in getattr(log, "handlers", ()):
            if isinstance(handler, logging.StreamHandler):
                yield handler
