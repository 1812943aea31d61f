"""Weights & Biases. Its environment variables apply, for instance WANDB_MODE=offline and WANDB_DIR."""

import os
import uuid
from typing import Any, Mapping, Sequence

from mindlora.training.trackers.tracker import TrackedRun, Tracker


class WandB(Tracker):
    package = "wandb"

    def begin(self, run: TrackedRun) -> str:
        import wandb

        identifier = run.id
        if run.adapter and identifier is None:
            # WANDB_RUN_ID would apply to all adapters.
            identifier = uuid.uuid4().hex[:8]
        self.run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or "mindlora",
            name=run.name_or(os.environ.get("WANDB_NAME")),
            group=run.group_or(os.environ.get("WANDB_RUN_GROUP")),
            tags=list(run.tags) or None,
            id=identifier,
            resume="allow" if run.id else None,
            # Adapters that train side by side have concurrent runs.
            reinit="create_new",
        )
        # With wandb's own step count, a resumed run could not resend a step that was sent before the run was killed.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        return self.run.id

    def configuration(self, facts: Mapping[str, Any]) -> None:
        self.run.config.update(dict(facts), allow_val_change=True)

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def event(self, step: int, kind: str, message: str) -> None:
        import wandb

        title = f"{kind} at step {step}"
        self.run.alert(title=title, text=message, level=wandb.AlertLevel.WARN, wait_duration=0)

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        import wandb

        rows = [[row["prompt"], row["answer"]] for row in answers]
        self.run.log({"step": step, "answers": wandb.Table(columns=["prompt", "answer"], data=rows)})

    def report(self, path: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"report-{self.run.id}", type="report")
        artifact.add_file(path)
        self.run.log_artifact(artifact)

    def end(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
