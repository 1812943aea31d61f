"""TensorBoard: event files in the folder tensorboard/ beside metrics.jsonl.

TensorBoard cannot hold report.html. Instead, it gets a text with the last figures and the page's path, and the
configuration as hyperparameters, by which its tab HPARAMS compares runs.
"""

import os
from typing import Any, Dict, Mapping, Sequence, Tuple

import yaml

from mindlora.training.trackers.tracker import TrackedRun, Tracker, as_text, flattened

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    package = "tensorboardX"

    def begin(self, run: TrackedRun) -> str:
        from tensorboardX import SummaryWriter

        # From this step on, TensorBoard hides the data of an earlier attempt.
        first = run.step + 1 if run.id else 0
        folder = os.path.join(run.directory, FOLDER)
        # Otherwise, a run resumed within the same second would overwrite the file.
        self.writer = SummaryWriter(folder, purge_step=first, filename_suffix=f".{run.step}")
        self.step = run.step
        self.settings: Dict[str, Any] = {}
        # Name -> its last step and value.
        self.last: Dict[str, Tuple[int, float]] = {}
        self.facts = {"name": run.name_or(None), "project": run.project, "tags": list(run.tags)}
        return FOLDER

    def configuration(self, facts: Mapping[str, Any]) -> None:
        text = yaml.safe_dump({"run": self.facts, **facts}, sort_keys=False, allow_unicode=True)
        self.writer.add_text("configuration", f"```yaml\n{text}```", self.step)
        self.settings = flattened(facts["configuration"])
        self.writer.flush()

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=seconds)
            if not name.startswith("health/"):
                self.last[name] = step, value
        self.writer.flush()

    def event(self, step: int, kind: str, message: str) -> None:
        self.writer.add_text(f"events/{kind}", message, step)

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        self.writer.add_text("answers", "\n\n".join(as_text(answers)), step)

    def report(self, path: str) -> None:
        from tensorboardX.summary import hparams

        rows = [f"| {name} | {value:.6g} | {step} |" for name, (step, value) in self.last.items()]
        table = "\n".join(["| | last | at step |", "| --- | --- | --- |", *rows])
        text = f"The page of the run, with its curves and answers: `{os.path.abspath(path)}`\n\n{table}"
        self.writer.add_text("report", text, max((step for step, _ in self.last.values()), default=self.step))
        # TensorBoard takes numbers, flags and texts, and leaves out None.
        plain = (bool, int, float, type(None))
        settings = {key: value if isinstance(value, plain) else str(value) for key, value in self.settings.items()}
        experiment, started, _ = hparams(settings, dict.fromkeys(self.last, 0))
        # The final summary would say that the run has succeeded.
        for summary in (experiment, started):
            self.writer.file_writer.add_summary(summary)
        self.writer.flush()

    def end(self, failed: bool) -> None:
        self.writer.close()
