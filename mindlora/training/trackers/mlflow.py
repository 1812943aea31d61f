"""MLflow. Its environment variables apply, for instance MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

import os
import threading
import time
from typing import Any, Mapping, Sequence

from mindlora.training.trackers.tracker import TrackedRun, Tracker, as_text, flattened

# Limits of a server: metrics per request, and the length of a parameter.
_METRICS, _PARAMETERS, _LENGTH = 1000, 100, 500
# Adapters that train side by side begin their runs concurrently.
_ONE_BEGINS = threading.Lock()


class MLflow(Tracker):
    package = "mlflow"

    def begin(self, run: TrackedRun) -> str:
        from mlflow import MlflowClient

        self.step = run.step
        self.events = 0
        with _ONE_BEGINS:
            self.client = MlflowClient()
            self.run_id = run.id or self._new_run(run)
        if run.id:
            self.client.update_run(run.id, status="RUNNING")
        return self.run_id

    def _new_run(self, run):
        """Creates a run in the experiment, which is created if it does not exist, and returns the run's id."""
        tags = dict.fromkeys(run.tags, "true")
        group = run.group_or(None)
        if group:
            tags["group"] = group
        experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") if run.project is None else None
        if experiment is None:
            name = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "mindlora"
            known = self.client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self.client.create_experiment(name)
        name = run.name_or(os.environ.get("MLFLOW_RUN_NAME"))
        return self.client.create_run(experiment, run_name=name, tags=tags).info.run_id

    def configuration(self, facts: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        self.client.log_dict(self.run_id, dict(facts), f"configuration/step_{self.step}.yaml")
        if self.step:
            # A parameter keeps its first value.
            return
        flat = {key: str(value)[:_LENGTH] for key, value in flattened(facts["configuration"]).items()}
        parameters = [Param(key, value) for key, value in flat.items() if value]
        for first in range(0, len(parameters), _PARAMETERS):
            self.client.log_batch(self.run_id, params=parameters[first : first + _PARAMETERS])

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(seconds * 1000), step) for name, value in values.items()]
        for first in range(0, len(metrics), _METRICS):
            self.client.log_batch(self.run_id, metrics=metrics[first : first + _METRICS])

    def event(self, step: int, kind: str, message: str) -> None:
        self.events += 1
        self.client.log_text(self.run_id, message, f"events/step_{step}_{self.events}_{kind}.txt")

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        self.client.log_text(self.run_id, "\n\n".join(as_text(answers)), f"answers/step_{step}.md")

    def report(self, path: str) -> None:
        self.client.log_artifact(self.run_id, path)

    def end(self, failed: bool) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED", int(time.time() * 1000))
