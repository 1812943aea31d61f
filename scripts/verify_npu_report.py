"""The folder that scripts/verify_npu.py leaves: report.md and report.json, complete at any moment."""

import dataclasses
import json
import os
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

from verify_npu_choices import choices, section
from verify_npu_page import page
from verify_npu_run import FAILED, HELD, NOT_RUN, RUNNING, STOPPED, Outcome, Unwritable

# Reserved for the last page, in case the disk becomes full.
RESERVE = 1 << 20
# Seconds between rewrites of a running step's page.
PERIOD = 1.0


class Report:
    """The results so far. Each change is written at once, and the previous page stays until the new one is complete.

    Args:
        folder (str): An empty folder.
        head (dict): The conditions of the results.
        steps (sequence of str): The requested steps.
        device (str): Ascend or CPU.
        clean (Callable): Cleans every text.

    Raises:
        Unwritable: The folder has no room for a page.
    """

    def __init__(
        self, folder: str, head: Dict[str, Any], steps: Sequence[str], device: str, clean: Callable[[str], str]
    ):
        self.folder, self.head, self.device, self.clean = folder, head, device, clean
        self.outcomes: List[Outcome] = []
        self.running: Optional[Outcome] = None
        self.stopped = ""
        self._waiting, self._since, self._written = list(steps), "", 0.0
        try:
            with open(os.path.join(folder, ".reserve"), "wb") as file:
                file.write(bytes(RESERVE))
        except OSError as error:
            raise Unwritable(f"{folder} has no room for a page ({error.strerror})") from error

    def begin(self, name: str, limit: Optional[int] = None, log: str = "") -> None:
        """Records that a step, or one of its commands, is running.

        Args:
            name (str): The step's name.
            limit (int or None): Its time limit in seconds.
            log (str): The name of its log in the folder.
        """
        if name in self._waiting:
            self._waiting.remove(name)
        started = time.strftime("%H:%M:%S UTC", time.gmtime())
        self.running = Outcome(name, RUNNING, f"since {started}" + (f", at most {limit} s" if limit else ""), log)
        self._since = self.running.line
        self.write()

    def at(self, line: str, seconds: float) -> None:
        """Records the running command's current line."""
        if self.running and time.time() - self._written >= PERIOD:
            self.running.line = self._since + (f"; last line: {line}" if line else "")
            self.running.seconds = round(seconds, 1)
            self.write()

    def end(self, outcome: Outcome) -> None:
        """Adds a step's outcome."""
        self.outcomes.append(outcome)
        self.running = None
        self.write()

    def stop(self, reason: str) -> None:
        """Records why the run ended early; the interrupted step gets a row. Frees the space reserved for this page."""
        self.stopped = reason
        if self.running:
            since = self.running.line
            self.outcomes.append(dataclasses.replace(self.running, state=STOPPED, line=f"{reason}; it ran {since}"))
            self.running = None
        self.free()
        self.write()

    def free(self) -> None:
        """Frees the space reserved for the last page."""
        if os.path.exists(os.path.join(self.folder, ".reserve")):
            os.remove(os.path.join(self.folder, ".reserve"))

    def write(self) -> None:
        """Rewrites both files.

        Raises:
            Unwritable: The files cannot be written; the previous ones are intact.
        """
        shown = [*self.outcomes, *([self.running] if self.running else [])]
        states = {state: sum(outcome.state == state for outcome in shown) for state in (HELD, FAILED, NOT_RUN, STOPPED)}
        chosen = choices(self.outcomes, self.device)
        report = {"machine": self.head, "ended early": self.stopped or None, "states": states, "choices": chosen}
        report["steps"] = [dataclasses.asdict(outcome) for outcome in shown]
        text = page(self.head, shown, self.stopped, self._waiting).rstrip("\n")
        self._replace("report.json", json.dumps(report, indent=2))
        self._replace("report.md", "\n".join([text, *section(chosen), ""]))
        self._written = time.time()

    def _replace(self, name: str, text: str) -> None:
        path = os.path.join(self.folder, name)
        try:
            with open(path + ".new", "w", encoding="utf-8") as file:
                file.write(self.clean(text))
            os.replace(path + ".new", path)
        except OSError as error:
            if os.path.exists(path + ".new"):
                os.remove(path + ".new")
            raise Unwritable(f"the folder of this page cannot be written to ({error.strerror})") from error
