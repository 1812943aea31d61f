"""The four trackers, their interface, and what they get from a run."""

import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import signal
import threading
import time
import uuid
from typing import Any, ClassVar, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Type

import yaml


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows.

    Attributes:
        directory (str): The folder of its metrics.jsonl.
        step (int): The step at which it starts: 0 for a new run, the saved step for a resumed one.
        project (str or None): The project's name in the YAML, or None.
        name (str or None): The run's name in the YAML, or None.
        default_name (str): The name of a run without one.
        adapter (str or None): The run's adapter, if several train side by side.
        tags (tuple of str): The run's tags.
        id (str or None): The tracker's id of the run that this one continues; None for a new run.
    """

    directory: str
    step: int
    project: Optional[str]
    name: Optional[str]
    default_name: str
    adapter: Optional[str]
    tags: Tuple[str, ...]
    id: Optional[str]

    def name_or(self, given: Optional[str]) -> str:
        """Returns the run's name: its adapter's, the YAML's, ``given`` from the environment, or the default."""
        return self.adapter or self.name or given or self.default_name

    def group_or(self, given: Optional[str]) -> Optional[str]:
        """Returns the group of several adapters' runs; ``given`` for a run with one adapter."""
        return (self.name or given or self.default_name) if self.adapter else given


class Tracker:
    """A tracker of one run. A subclass's methods send their arguments, or raise whatever its package raises.

    The methods are called one after another, on the tracker's own thread.

    Attributes:
        package (str): The package that must be importable. The extra of mindlora that installs it has the tracker's
            name.
        on_main_thread (bool): Whether ``begin`` and ``end`` are called on the main thread.
    """

    package = ""
    on_main_thread = False

    @classmethod
    def is_installed(cls) -> bool:
        """Returns whether the tracker's package is installed."""
        return importlib.util.find_spec(cls.package) is not None

    def begin(self, run: TrackedRun) -> str:
        """Begins or continues a run; returns the tracker's id of it."""
        raise NotImplementedError

    def configuration(self, facts: Mapping[str, Any]) -> None:
        """Sends the run's configuration, data, versions and machine; a resumed run sends them again."""
        raise NotImplementedError

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Sends the measurements of a step, taken ``seconds`` after the start of 1970."""
        raise NotImplementedError

    def event(self, step: int, kind: str, message: str) -> None:
        """Sends an event that a guard, a schedule or the adapter's health reported at a step."""
        raise NotImplementedError

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        """Sends answers of SampleAnswers, each a "prompt" and an "answer"."""
        raise NotImplementedError

    def report(self, path: str) -> None:
        """Sends the run's page, report.html."""
        raise NotImplementedError

    def end(self, failed: bool) -> None:
        """Ends the run; ``failed`` says whether an error ended training."""
        raise NotImplementedError


def flattened(node: Mapping[str, Any], separator: str = ".", before: str = "") -> Dict[str, Any]:
    """Returns {joined keys: value} of a mapping of mappings."""
    flat: Dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, separator, f"{before}{key}{separator}"))
        else:
            flat[f"{before}{key}"] = value
    return flat


def measured(record: Mapping[str, Any]) -> Dict[str, float]:
    """Returns {name: value} of the numbers in a record of metrics.jsonl, except its step and time.

    Numbers of "health" have names like ``health/CELL/parts/A/norm``; lists (findings, singular values) are left out.
    """
    health = record.get("health") or {}
    fields = {key: value for key, value in record.items() if key not in ("step", "time", "health")}
    fields.update(flattened(health.get("cells") or {}, "/", "health/"))
    return {name: float(value) for name, value in fields.items() if isinstance(value, (int, float))}


def as_text(answers: Sequence[Mapping[str, str]]) -> List[str]:
    """Returns each prompt with its answer, as Markdown."""
    return [f"**{row['prompt']}**\n\n{row['answer']}" for row in answers]


_TENSORBOARD = "tensorboard"


class TensorBoard(Tracker):
    """TensorBoard: event files in the folder tensorboard/ beside metrics.jsonl.

    TensorBoard cannot hold report.html. Instead, it gets a text with the last figures and the page's path, and the
    configuration as hyperparameters, by which its tab HPARAMS compares runs.
    """

    package = "tensorboardX"

    def begin(self, run: TrackedRun) -> str:
        from tensorboardX import SummaryWriter

        # From this step on, TensorBoard hides the data of an earlier attempt.
        first = run.step + 1 if run.id else 0
        folder = os.path.join(run.directory, _TENSORBOARD)
        # Otherwise, a run resumed within the same second would overwrite the file.
        self.writer = SummaryWriter(folder, purge_step=first, filename_suffix=f".{run.step}")
        self.step = run.step
        self.settings: Dict[str, Any] = {}
        # Name -> its last step and value.
        self.last: Dict[str, Tuple[int, float]] = {}
        self.facts = {"name": run.name_or(None), "project": run.project, "tags": list(run.tags)}
        return _TENSORBOARD

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


@contextlib.contextmanager
def _keeping_interrupts() -> Iterator[None]:
    """Leaves Ctrl-C to GracefulStop: SwanLab's handler would end its run before the step is saved."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


class SwanLab(Tracker):
    """SwanLab. Its environment variables apply, for instance SWANLAB_MODE=offline and SWANLAB_LOG_DIR.

    It tracks one run per process: adapters that train side by side share the run, each with its name as a prefix.
    """

    package = "swanlab"
    # SwanLab installs signal handlers, and later restores the former ones.
    on_main_thread = True
    # The adapters that send to the process's run.
    sharing: ClassVar[Set[Optional[str]]] = set()

    def begin(self, run: TrackedRun) -> str:
        import swanlab

        self.adapter = run.adapter
        self.before = f"{run.adapter}/" if run.adapter else ""
        self.last_step = run.step
        if run.adapter and self.sharing and swanlab.has_run():
            self.run = swanlab.get_run()
        else:
            environment = os.environ.get
            self.sharing.clear()
            project = run.project or environment("SWANLAB_PROJ_NAME") or environment("SWANLAB_PROJECT") or "mindlora"
            with _keeping_interrupts():
                self.run = swanlab.init(
                    project=project,
                    name=run.name or environment("SWANLAB_EXP_NAME") or run.default_name,
                    tags=list(run.tags) or None,
                    id=run.id,
                    resume="allow" if run.id else None,
                )
        self.sharing.add(self.adapter)
        return self.run.id

    def configuration(self, facts: Mapping[str, Any]) -> None:
        self.run.config.update({self.adapter: dict(facts)} if self.adapter else dict(facts))

    def numbers(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._log(step, values)

    def event(self, step: int, kind: str, message: str) -> None:
        import swanlab

        self._log(step, {f"events/{kind}": swanlab.Text(message)})

    def answers(self, step: int, answers: Sequence[Mapping[str, str]]) -> None:
        import swanlab

        self._log(step, {"answers": [swanlab.Text(text) for text in as_text(answers)]})

    def report(self, path: str) -> None:
        import swanlab

        self._log(self.last_step, {"report": swanlab.Html(pathlib.Path(path))})

    def end(self, failed: bool) -> None:
        self.sharing.discard(self.adapter)
        if not self.sharing:
            with _keeping_interrupts():
                self.run.finish("crashed" if failed else "success", "The run has failed." if failed else None)

    def _log(self, step, values):
        self.last_step = step
        self.run.log({self.before + name: value for name, value in values.items()}, step=step)


class WandB(Tracker):
    """Weights & Biases. Its environment variables apply, for instance WANDB_MODE=offline and WANDB_DIR."""

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


# Limits of a server: metrics per request, and the length of a parameter.
_METRICS, _PARAMETERS, _LENGTH = 1000, 100, 500
# Adapters that train side by side begin their runs concurrently.
_ONE_BEGINS = threading.Lock()


class MLflow(Tracker):
    """MLflow. Its environment variables apply, for instance MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

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


TRACKERS: Dict[str, Type[Tracker]] = {"tensorboard": TensorBoard, "swanlab": SwanLab, "wandb": WandB, "mlflow": MLflow}
