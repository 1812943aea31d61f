"""The end of a run that fails with an error of MindFormers or MindSpore: one line, and the traceback in a file."""

import os
import traceback
from typing import Optional

from mindformers.tools.register import MindFormerConfig
from mindformers.tools.utils import get_real_rank

# MindSpore's messages go on with sources, graphs and C++ frames.
_LONGEST = 400


def described(error: Exception, config: Optional[MindFormerConfig]) -> str:
    """Returns one line that names an error, and writes its traceback to a file in the run's output folder.

    The configuration is None if the error came before it was read.
    """
    return f"the run ended with {type(error).__name__}: {sentence(error)} {_keep_traceback(error, config)}"


def sentence(error: BaseException) -> str:
    """Returns the first line of an error's message that says something, shortened, with a full stop."""
    lines = (line.strip() for line in str(error).splitlines())
    first = next((line for line in lines if line.strip("-")), "no message")
    shortened = first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
    return shortened if shortened.endswith((".", "!", "?")) else f"{shortened}."


def _keep_traceback(error: Exception, config: Optional[MindFormerConfig]) -> str:
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
