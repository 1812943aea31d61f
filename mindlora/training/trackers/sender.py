"""One tracker of a run, which is sent what metrics.jsonl gets, on a thread of its own."""

import os
import threading
import time
from typing import Any, Callable, ClassVar, Mapping

from mindlora.training.log import logger
from mindlora.training.report.history import HistoryReader
from mindlora.training.trackers.tracker import TrackedRun, Tracker, measured

# Seconds after which a record that could not be sent is tried again.
RETRY_AFTER = 60.0
_DESCRIPTION = ("configuration", "data", "versions", "machine", "total_steps")


class Sender(threading.Thread):
    """Sends a tracker all records of metrics.jsonl, in their order.

    The file is the queue: it never fills up, and a record that could not be sent is tried again. Training goes on
    whatever the tracker does.

    Args:
        name (str): The name of the tracker, as in report_to.
        tracker (Tracker): The tracker, which has not begun.
        run (TrackedRun): The run.
        reader (HistoryReader): Reads what the tracker has not got.
        note (callable): Takes the tracker's name and what it calls the run, once it has begun.
    """

    patience: ClassVar[float] = 60.0

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, reader: HistoryReader, note: Callable[[str, str], None]
    ):
        # A run ends without it where the tracker never answers.
        super().__init__(name=f"mindlora-{name}", daemon=True)
        self.tracker_name = name
        self.tracker = tracker
        self.tracked = run
        self.reader = reader
        self.note = note
        self.begun = self.ending = self.failed = False
        self.report = ""
        self._news = threading.Event()
        self._failed_at = 0.0
        self._behind = self._has_warned = False

    def start(self) -> None:
        """Begins the run, and to send."""
        if self.tracker.on_main_thread:
            self._begin()
        super().start()

    def wake(self) -> None:
        """Sends what is new in metrics.jsonl."""
        self._news.set()

    def end(self, report: str, failed: bool) -> None:
        """Ends the tracker's run once it has all records; ``wait`` waits for that.

        Args:
            report (str): The path of report.html, whether or not it is there.
            failed (bool): Whether an error has ended the run.
        """
        self.report = report
        self.failed = failed
        self.ending = True
        self.wake()

    def wait(self) -> None:
        """Waits until the tracker's run has ended; all that wait in vain do it for ``patience`` seconds together."""
        began = time.monotonic()
        self.join(Sender.patience)
        if self.is_alive():
            Sender.patience = max(0.0, Sender.patience - (time.monotonic() - began))
        elif self.begun and self.tracker.on_main_thread:
            self._try(lambda: self.tracker.end(self.failed))
        if self.is_alive() or self._behind:
            logger.warning(
                "%s has not taken all of the run, which ends without it. Read what is missing in metrics.jsonl.",
                self.tracker_name,
            )

    def run(self) -> None:
        """Sends until the run ends."""
        if not self.tracker.on_main_thread:
            self._begin()
        if not self.begun:
            return
        ending = False
        while not ending:
            self._news.wait()
            self._news.clear()
            ending = self.ending
            if ending or not self._behind or time.monotonic() - self._failed_at >= RETRY_AFTER:
                self._behind = not self._try(self._send)
        if os.path.isfile(self.report):
            self._try(lambda: self.tracker.report(self.report))
        if not self.tracker.on_main_thread:
            self._try(lambda: self.tracker.end(self.failed))

    def _begin(self):
        try:
            self.note(self.tracker_name, self.tracker.begin(self.tracked))
            self.begun = True
        except Exception as error:
            known = self.tracked.id
            logger.warning(
                "%s cannot begin (%s: %s), and the run goes on without it; metrics.jsonl is written. Check its "
                "settings and its server%s.",
                self.tracker_name,
                type(error).__name__,
                error,
                f", or delete trackers.json, which says that the run goes on with {known}" if known else "",
            )

    def _try(self, call):
        """Returns whether the tracker did what it was called for; warns once if it did not."""
        try:
            call()
        except Exception as error:
            self._failed_at = time.monotonic()
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s does not take the run (%s: %s). Training goes on, metrics.jsonl has everything, and what is "
                    "missing is sent again every %d seconds and when the run ends. Check the tracker's server.",
                    self.tracker_name,
                    type(error).__name__,
                    error,
                    RETRY_AFTER,
                )
            return False
        return True

    def _send(self):
        for kind, record in self.reader.records():
            self._send_record(kind, record)

    def _send_record(self, kind: str, record: Mapping[str, Any]) -> None:
        step = record["step"]
        if kind == "run":
            described = {name: record["run"][name] for name in _DESCRIPTION if name in record["run"]}
            self.tracker.configuration(described)
        elif kind == "event":
            self.tracker.event(step, record["event"], record["message"])
        elif kind == "answers":
            self.tracker.answers(step, record["answers"])
        elif kind != "evaluation":
            self.tracker.numbers(step, record.get("time") or time.time(), measured(record))
