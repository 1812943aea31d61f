"""Runs one command of scripts/verify_npu.py: its log, cleaned, its time limit and its outcome in one line."""

import dataclasses
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import Any, Dict, Mapping, Optional, Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HELD, FAILED, NOT_RUN = "holds", "does not hold", "not run"
# A path with at least two parts, of which the last is kept. Those of the system say where CANN and the driver are.
_PATH = re.compile(r"(?<![\w<>./])(?!/usr/|/dev/)(?:/[\w.+@~-]+)+/([\w.+@~-]+)")
# Four numbers with dots, but no version of five; and as IPv6 and network cards have it, with colons.
_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\w)|(?<![\w:.])(?:[0-9a-fA-F]{1,4}::?){4,7}[0-9a-fA-F]{1,4}(?![\w:])"
)


@dataclasses.dataclass
class Outcome:
    """What came of one step.

    Attributes:
        name (str): The step.
        state (str): HELD, FAILED or NOT_RUN.
        line (str): One sentence about it.
        log (str): The name of its log in the folder, or "".
        seconds (float): How long it took.
        figures (dict): What it measured.
    """

    name: str
    state: str
    line: str
    log: str = ""
    seconds: float = 0.0
    figures: Dict[str, Any] = dataclasses.field(default_factory=dict)


class Cleaner:
    """Takes names of the host and of its user, addresses and paths out of a text.

    Args:
        places (mapping): Folders and what stands for each; a folder within another must have a longer path.
    """

    def __init__(self, places: Mapping[str, str]):
        known = {ROOT: "<checkout>", sys.prefix: "<python>", os.path.expanduser("~"): "<home>", **places}
        known.pop("/usr", None)  # the prefix of the system's Python
        # The longest first: one may be within another.
        self._places = sorted(((path, name) for path, name in known.items() if len(path) > 1), key=lambda p: -len(p[0]))
        names = {socket.gethostname(), socket.getfqdn(), *_user()} - {"", "root", "localhost"}
        self._names = sorted((name for name in names if len(name) > 1), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """Returns the text without them."""
        for path, name in self._places:
            text = re.sub(rf"{re.escape(path)}(?![\w-])", name, text)
        text = _PATH.sub(r"<path>/\1", text)
        for name in self._names:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<name>", text)
        return _ADDRESS.sub(lambda found: found[0] if found[0] in ("127.0.0.1", "0.0.0.0") else "<address>", text)


def _user():
    try:
        return {getpass.getuser()}
    except (KeyError, OSError):  # a container may have no entry for its user
        return set()


def run(
    name: str,
    command: Sequence[str],
    folder: str,
    clean: Cleaner,
    environment: Mapping[str, str],
    limit: int,
    cannot: Sequence[str] = (),
) -> Outcome:
    """Runs a command in the checkout, and writes what it printed to logs/<name>.log of the folder.

    Args:
        name (str): The step.
        command (sequence of str): The program and its arguments.
        folder (str): The folder of the report.
        clean (Cleaner): What the log goes through.
        environment (mapping): The environment variables.
        limit (int): Seconds after which the command and its children are killed.
        cannot (sequence of str): Words of a last line by which the command says that this machine lacks something.

    Returns:
        Outcome, whose line is the command's last one if it failed.
    """
    log, started = os.path.join("logs", f"{name.replace(' ', '_')}.log"), time.time()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    late: Optional[str] = None
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        late = f"it did not end within {limit} s and was killed"
    except BaseException:  # Ctrl-C in the terminal does not reach a session of its own
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    text = clean(output.decode("utf-8", "replace"))
    with open(os.path.join(folder, log), "w", encoding="utf-8") as file:
        file.write(text)
    seconds = round(time.time() - started, 1)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    if process.returncode == 0:
        return Outcome(name, HELD, lines[-1], log, seconds)
    if any(words in lines[-1] for words in cannot):
        return Outcome(name, NOT_RUN, lines[-1].rpartition("rror: ")[2], log, seconds)
    return Outcome(name, FAILED, f"{late or f'exit code {process.returncode}'}; last line: {lines[-1]}", log, seconds)
