"""Trackers: sends a run's records to TensorBoard, SwanLab, Weights & Biases and MLflow."""

import atexit
import os
import threading
import time
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Optional, Sequence, Union

from mindformers.tools.utils import get_real_rank
from mindspore import Callback
from mindspore.train import RunContext

from mindlora.core import atomic
from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.json_files import parse_object, write_json
from mindlora.training.callbacks.common import register
from mindlora.training.log import logger
from mindlora.training.report.history import HistoryReader
from mindlora.training.report.run_report import REPORT_NAME, RunReport
from mindlora.training.trackers.rules import check_settings
from mindlora.training.trackers.tracker import TRACKERS, TrackedRun, Tracker, measured

# The file of the trackers' ids of the run, beside metrics.jsonl: a resumed run continues the same runs.
FILE_NAME = "trackers.json"
# Seconds until a record that could not be sent is retried.
RETRY_AFTER = 60.0
_DESCRIPTION = ("configuration", "data", "versions", "machine", "total_steps")


@register
class Trackers(Callback):
    """Sends RunReport's records to trackers: numbers, configuration, events, answers and, at the end, the report.

    Rank 0 sends, on one thread per tracker. Whatever a tracker does, training continues, and metrics.jsonl has
    everything. A resumed run continues each tracker's run, whose id is in trackers.json.

    Args:
        report_to (str or list of str): One or more of tensorboard, swanlab, wandb and mlflow.
        project (str): The project, or MLflow's experiment. Default: None, the value of the tracker's environment
            variable, or "mindlora".
        name (str): The run's name. Default: None, the value of the tracker's environment variable, or the name of the
            output folder.
        tags (list of str): Tags of the run. Default: (), none.
        adapter (str): The adapter to report on, in a run with several; mindlora sets it. Default: None.

    Raises:
        ConfigError: An argument has a wrong value, or no RunReport is among the callbacks.
    """

    def __init__(
        self,
        report_to: Union[str, Sequence[str]],
        project: Optional[str] = None,
        name: Optional[str] = None,
        tags: Sequence[str] = (),
        adapter: Optional[str] = None,
    ):
        super().__init__()
        self.names = check_settings(report_to, project, name, tags, adapter)
        self.project, self.name, self.tags, self.adapter = project, name, tuple(tags), adapter
        self.directory = ""
        self.senders: List[Sender] = []
        self.has_begun = False
        self.ids: Dict[str, str] = {}
        self.lock = threading.Lock()

    def on_train_begin(self, run_context: RunContext) -> None:
        """Raises ConfigError if nothing records the run."""
        if not self._reports(run_context):
            raise ConfigError("Trackers sends what RunReport records: add RunReport to callbacks, before Trackers.")

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Begins the run of each tracker."""
        # RunReport, which runs earlier, has begun the history by now, on rank 0.
        if self.has_begun or get_real_rank() != 0:
            return
        self.has_begun = True
        report = next(report for report in self._reports(run_context) if report.history is not None)
        self.directory = report.directory
        step = report.step_before
        self.ids = _read_ids(self.directory) if step else {}
        self._write_ids()
        for name in self.names:
            self._begin(name, report.history, step)
        if self.senders:
            # Under the PyNative Trainer, an error ends the run without notifying callbacks.
            atexit.register(self._finish, failed=True)

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Sends the step."""
        for sender in self.senders:
            sender.wake()

    def on_train_end(self, run_context: RunContext) -> None:
        """Ends the run of each tracker, with the report."""
        self._finish(failed=False)

    def __exit__(self, *error: Any) -> None:
        """Ends the runs as failed if an error has ended training."""
        self._finish(failed=error[0] is not None)

    def _begin(self, name, history, step):
        """Begins the run of a tracker."""
        tracker = TRACKERS[name]()
        if not tracker.is_installed():
            logger.warning(
                "Trackers: %s is not installed, and the run goes on without it: pip install 'mindlora[%s]'. "
                "metrics.jsonl is written.",
                tracker.package,
                name,
            )
            return
        folder = os.path.dirname(self.directory) if self.adapter else self.directory
        known = self.ids.get(name)
        run = TrackedRun(
            self.directory, step, self.project, self.name, os.path.basename(folder), self.adapter, self.tags, known
        )
        # A tracker that is new to the run gets all records.
        reader = HistoryReader(history.path, history.start if known else 0)
        self.senders.append(Sender(name, tracker, run, reader, self._note))
        self.senders[-1].start()

    def _note(self, name, identifier):
        """Saves a tracker's id of the run."""
        with self.lock:
            self.ids[name] = identifier
            self._write_ids()

    def _write_ids(self):
        with atomic.replace_file(os.path.join(self.directory, FILE_NAME)) as path:
            write_json(path, self.ids)

    def _finish(self, failed):
        senders, self.senders = self.senders, []
        for sender in senders:
            sender.end(os.path.join(self.directory, REPORT_NAME), failed)
        for sender in senders:
            sender.wait()
        atexit.unregister(self._finish)

    @staticmethod
    def _reports(run_context):
        return [each for each in run_context.original_args().list_callback if isinstance(each, RunReport)]


def _read_ids(directory: str) -> Dict[str, str]:
    """Returns the content of trackers.json, tracker -> id of the run; empty if the file is missing or damaged."""
    path = os.path.join(directory, FILE_NAME)
    if not os.path.isfile(path):
        return {}
    try:
        with open(path, "rb") as file:
            return parse_object(file.read(), path, ConfigError)
    except LoraError as error:
        logger.warning("The trackers begin new runs. To continue the earlier runs, correct this: %s", error)
        return {}


class Sender(threading.Thread):
    """A thread that sends a tracker all records of metrics.jsonl, in order.

    The file is the queue: it never fills up, and a record that could not be sent is retried. Training continues
    whatever the tracker does.

    Args:
        name (str): The name of the tracker, as in report_to.
        tracker (Tracker): The tracker, not yet begun.
        run (TrackedRun): The run.
        reader (HistoryReader): Reads the records that the tracker does not have.
        note (callable): Called with the tracker's name and its id of the run, once the run has begun.
    """

    patience: ClassVar[float] = 60.0

    def __init__(
        self, name: str, tracker: Tracker, run: TrackedRun, reader: HistoryReader, note: Callable[[str, str], None]
    ):
        # The training process can exit even if the tracker never answers.
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
        """Begins the run and starts sending."""
        if self.tracker.on_main_thread:
            self._begin()
        super().start()

    def wake(self) -> None:
        """Wakes the thread to send new records of metrics.jsonl."""
        self._news.set()

    def end(self, report: str, failed: bool) -> None:
        """Requests the end of the tracker's run once it has all records; ``wait`` waits for it.

        Args:
            report (str): The path of report.html, whether or not the file exists.
            failed (bool): Whether an error has ended the run.
        """
        self.report = report
        self.failed = failed
        self.ending = True
        self.wake()

    def wait(self) -> None:
        """Waits until the tracker's run has ended; all senders together wait at most ``patience`` seconds."""
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
        """Returns whether a call to the tracker succeeded; warns once if it did not."""
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
