"""Runs one command of scripts/verify_npu.py, with a cleaned log, a time limit and a one-line outcome."""

import contextlib
import dataclasses
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, Any, Dict, List, Mapping, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HELD, FAILED, NOT_RUN = "holds", "does not hold", "not run"
RUNNING, STOPPED = "is running", "ended early"
# A path with at least two parts, the last of which is kept. System paths show where CANN and the driver are.
_PATH = re.compile(r"(?<![\w<>./])(?!/usr/|/dev/)(?:/[\w.+@~-]+)+/([\w.+@~-]+)")
# Four numbers with dots, but not a version of five numbers; and IPv6 and MAC addresses, with colons.
_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\w)|(?<![\w:.])(?:[0-9a-fA-F]{1,4}::?){4,7}[0-9a-fA-F]{1,4}(?![\w:])"
)


@dataclasses.dataclass
class Outcome:
    """The outcome of one step.

    Attributes:
        name (str): The step.
        state (str): HELD, FAILED, NOT_RUN, RUNNING or STOPPED.
        line (str): One sentence about the outcome.
        log (str): The name of the step's log in the folder, or "".
        seconds (float): How long it took.
        figures (dict): The step's measurements.
        excused (bool): Whether the step did not run for lack of NPUs, or because of --device CPU: nothing that the
            owner could fix.
    """

    name: str
    state: str
    line: str
    log: str = ""
    seconds: float = 0.0
    figures: Dict[str, Any] = dataclasses.field(default_factory=dict)
    excused: bool = False


class Cleaner:
    """A function that removes host and user names, addresses and paths from a text.

    Args:
        places (mapping): Folder -> its replacement; a folder within another must have a longer path.
    """

    def __init__(self, places: Mapping[str, str]):
        known = {ROOT: "<checkout>", sys.prefix: "<python>", os.path.expanduser("~"): "<home>", **places}
        known.pop("/usr", None)  # The prefix of the system's Python.
        # The longest path first, since folders may be nested.
        self._places = sorted(((path, name) for path, name in known.items() if len(path) > 1), key=lambda p: -len(p[0]))
        names = {socket.gethostname(), socket.getfqdn(), *_user()} - {"", "root", "localhost"}
        self._names = sorted((name for name in names if len(name) > 1), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Returns the cleaned text."""
        for path, name in self._places:
            text = re.sub(rf"{re.escape(path)}(?![\w-])", name, text)
        text = _PATH.sub(r"<path>/\1", text)
        for name in self._names:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<name>", text)
        return _ADDRESS.sub(lambda found: found[0] if found[0] in ("127.0.0.1", "0.0.0.0") else "<address>", text)


def _user():
    try:
        return {getpass.getuser()}
    except (KeyError, OSError):  # A container may have no entry for its user.
        return set()


class Stopped(Exception):
    """Raised when a signal ends the run."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"{SIGNALS[number]} came")


SIGNALS = {signal.SIGINT: "Ctrl-C (SIGINT)", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP (a closed terminal)"}
_received: List[int] = []


def listen() -> None:
    """Makes signals be recorded from now on, so that running commands can be ended in order. `nohup` still works."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda got, frame: _received.append(got))


def check_signals() -> None:
    """Raises Stopped if a signal came."""
    if _received:
        raise Stopped(_received[0])


class Unwritable(Exception):
    """Raised when the report's folder cannot be written to."""


class Log(threading.Thread):
    """A thread that copies a command's output to its log, line by line, cleaned.

    Attributes:
        last (str): The last line that is not empty.
        error (OSError or None): Why the log could not be written.
    """

    def __init__(self, output: IO[bytes], path: str, clean: Cleaner):
        super().__init__(daemon=True)
        self.last, self.error = "", None
        self._output, self._path, self._clean = output, path, clean

    def run(self) -> None:
        try:
            with open(self._path, "w", encoding="utf-8") as file:
                for line in self._output:
                    text = self._clean(line.decode("utf-8", "replace"))
                    file.write(text)
                    file.flush()
                    self.last = text.strip() or self.last
        except OSError as error:
            self.error = error


def run(
    name: str,
    command: Sequence[str],
    report: Any,
    clean: Cleaner,
    environment: Mapping[str, str],
    limit: int,
    cannot: Sequence[str] = (),
) -> Outcome:
    """Runs a command in the checkout, and writes its output to logs/<name>.log in the report's folder.

    Args:
        name (str): The step.
        command (sequence of str): The program and its arguments.
        report (Report): Shows that the command is running, and its last line.
        clean (Cleaner): Cleans the log.
        environment (mapping): The environment variables.
        limit (int): Seconds after which the command and its children are killed.
        cannot (sequence of str): Words of a last line that mean that this machine lacks a requirement.

    Returns:
        Outcome, whose line is the command's last line if it failed.

    Raises:
        Stopped: A signal came; the command and its children were killed.
        Unwritable: The log cannot be written; the command and its children were killed.
    """
    log, started = os.path.join("logs", f"{name.replace(' ', '_')}.log"), time.time()
    report.begin(name, limit, log)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed = Log(process.stdout, os.path.join(report.folder, log), clean)
    printed.start()
    late = False
    try:
        while process.poll() is None and not printed.error and not late:
            check_signals()
            report.at(printed.last, time.time() - started)
            late = time.time() - started > limit
            time.sleep(0.1)
    finally:
        if process.poll() is None:
            kill(process)
        # A child that is still running holds the pipe open.
        printed.join(5)
        if printed.is_alive():
            kill(process)
            printed.join(5)
    if printed.error:
        raise Unwritable(f"{log} cannot be written to ({printed.error.strerror})") from printed.error
    seconds, last = round(time.time() - started, 1), printed.last or "it printed nothing"
    if process.returncode == 0:
        return Outcome(name, HELD, last, log, seconds)
    if any(words in last for words in cannot):
        return Outcome(name, NOT_RUN, last.rpartition("rror: ")[2], log, seconds)
    why = f"it did not end within {limit} s and was killed" if late else f"exit code {process.returncode}"
    return Outcome(name, FAILED, f"{why}; last line: {last}", log, seconds)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """Kills a command with all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
