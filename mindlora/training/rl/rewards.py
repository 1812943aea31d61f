"""Rewards: the reward functions of a run, in a separate process that is started once."""

import contextlib
import json
import logging
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Deque, Mapping, Optional, Sequence, Tuple, Type

import numpy as np

from mindlora.core.errors import RewardError
from mindlora.training.rl.settings import RlSettings

logger = logging.getLogger("mindlora")

_ROOT = pathlib.Path(__file__).resolve().parents[3]
# Seconds that Python and the imports of a rewards file may take to load.
_LOADING = 300.0
# Seconds after which a process that should have ended, at its time limit or without its parent, is killed.
_GRACE = 5.0
# Number of lines of its output that an error shows.
_LINES = 15
_KEY = "rl.reward_funcs"
# The names of a function's other arguments.
_ARGUMENTS = ("prompts", "completions")


class Rewards:
    """The process that rates answers and calls the tools of a run.

    A function that hangs, crashes or raises causes one error, and never crashes the trainer.

    The functions' output goes to the log, line by line.

    Args:
        settings (RlSettings): The run's settings: its functions and their time limit.
        folder (str): The folder from which paths of functions start.

    Raises:
        RewardError: A function cannot be loaded.
    """

    def __init__(self, settings: RlSettings, folder: str):
        self._settings = settings
        self._output: Deque[str] = deque(maxlen=_LINES)
        self._connection, theirs = multiprocessing.Pipe()
        path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                # Unbuffered, so that a function's output is not lost when it crashes.
                [sys.executable, "-u", "-m", "mindlora.training.rl.reward_process", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # A separate session: only the trainer gets Ctrl-C, and processes that the functions start end with
                # them.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._log_output, daemon=True)
        self._reader.start()
        try:
            for function, name in zip(settings.reward_funcs, settings.reward_names):
                self._ask(f"{_KEY}: {name}", _LOADING, "load", (function, os.path.abspath(folder)))
            #: The tools as OpenAI has them.
            self.tools = [
                self._ask(f"{tool.key}: {tool.name}", _LOADING, "load_tool", (tool, os.path.abspath(folder)))
                for tool in settings.tools
            ]
        except BaseException:
            self.close()
            raise

    def of(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> np.ndarray:
        """Returns float64 [rows, functions], NaN where a function returned None.

        Args:
            prompts (list of str): The prompt of each answer.
            completions (list of str): The answers.
            columns (dict): Name of another column of the data -> its value for each answer.

        Raises:
            RewardError: A function took longer than reward_timeout, crashed, raised, or returned something other than
                a number or None for each answer; or no answer has a reward.
        """
        for name in _ARGUMENTS:
            if name in columns:
                raise RewardError(
                    f"The data has a column {name}, and reward functions get the {name} of a step by that name. Rename "
                    "the column."
                )
        settings = self._settings
        rewards = np.empty((len(completions), len(settings.reward_funcs)))
        for number, name in enumerate(settings.reward_names):
            arguments = (number, list(prompts), list(completions), dict(columns))
            # None becomes NaN.
            rewards[:, number] = np.array(
                self._ask(f"{_KEY}: {name}", settings.reward_timeout, "rate", arguments), np.float64
            )
        if np.isnan(rewards).all():
            raise RewardError(
                f"rl.reward_funcs: {', '.join(settings.reward_names)} returned None for all {len(completions)} "
                "completions of a step, so there is nothing to learn from. Change them, or the data that they rate."
            )
        return rewards

    def call(self, number: int, arguments: str) -> Tuple[str, bool]:
        """Calls the tool with this number; returns its result, and whether it raised; ``arguments`` are JSON.

        Raises RewardError if the tool took longer than reward_timeout, or ended its process.
        """
        tool = self._settings.tools[number]
        said, failed = self._ask(f"{tool.key}: {tool.name}", self._settings.reward_timeout, "call", (number, arguments))
        return said, failed

    def close(self) -> None:
        """Ends the process, and the processes that its functions have started."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._kill()

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], traceback: Optional[TracebackType]
    ) -> None:
        self.close()

    def _ask(self, name: str, seconds: float, method: str, arguments: Tuple[Any, ...]) -> Any:
        """Returns the result of a method of the process's Functions; without an answer, the process has ended.

        ``name`` is the function's key and name, for messages.
        """
        begin = time.monotonic()
        try:
            self._connection.send((seconds, method, arguments))
            # The process ends itself when its time is up.
            if self._connection.poll(seconds + _GRACE):
                answer = json.loads(self._connection.recv_bytes())
                if "error" in answer:
                    reasons = answer["error"]
                    raise RewardError(f"{name}: {reasons}")
                return answer["result"]
        except (EOFError, OSError):
            pass
        is_late = time.monotonic() - begin >= seconds
        # A process that is already ending has its own exit code.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._kill()
        self._reader.join(_GRACE)
        output = "".join(f"\n{line}" for line in self._output)
        shown = f" The end of its output:{output}" if output else ""
        if is_late and method == "load":
            raise RewardError(f"{name} has not loaded after {seconds:g} s. Make it faster.{shown}")
        if is_late:
            raise RewardError(
                f"{name} has not returned after {seconds:g} s and was stopped. Make it faster, or "
                f"raise rl.reward_timeout.{shown}"
            )
        raise RewardError(
            f"{name} has ended its process ({_end(self._process.returncode)}). Correct the function.{shown}"
        )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _log_output(self) -> None:
        with self._process.stdout as lines:  # type: ignore[union-attr]
            for line in lines:
                self._output.append(line.rstrip("\n"))
                logger.info("rl.reward_funcs: %s", line.rstrip("\n"))


def _end(code: Optional[int]) -> str:
    """Describes how a process ended."""
    return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
