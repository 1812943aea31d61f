"""TensorBoard: event files in the folder tensorboard/ beside metrics.jsonl."""

import os
from typing import Any, Mapping, Sequence

import yaml

from mindlora.training.trackers.tracker import TrackedRun, Tracker, as_text

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    package = "tensorboardX"

    def begin(self, run: TrackedRun) -> str:
        from tensorboardX import SummaryWriter

        # From this step on, TensorBoard hides what an earlier try wrote.
        first = run.step + 1 if run.id else 0
        folder = os.path.join(run.directory, FOLDER)
        # Else a run that goes on within the same second writes over the file.
        self.writer = SummaryWriter(folder, purge_step=first, filename_suffix=f".{run.step}")
        self.step = run.step
        self.facts = {"name": run.name_or(None), "project": run.project, "tags": list(run.tags)}
        return FOLDER

    def configuration(self, facts: Mapping[str, Any]) -> None:
        text = yaml.safe_dump({"run": self.facts, **facts}, sort_keys=False, allow_unicode=True)
        self.writer.add_text("configuration", f"```yaml\n{text}```", self.step)
        self.writer.flush()

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step, walltime=seconds)
        self.writer.flush()

    def event(self, step: int, kind: str, message: str) -> None:
        self.writer.add_text(f"events/{kind}", message, step)

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        self.writer.add_text("answers", "\n\n".join(as_text(answers)), step)

    def report(self, path: str) -> None:
        """Leaves the page where it is: TensorBoard shows none."""

    def end(self, failed: bool) -> None:
        self.writer.close()
