"""Scripted runs that Trackers shows to the real trackers, and what these hold afterwards, in a process of its own.

python -m tests.support.tracked_runs FOLDER: trains until step 3, goes on after step 2, and calls the callbacks of two
adapters side by side; writes what each tracker holds to FOLDER/found.json.
"""

import glob
import json
import os
import pathlib
import signal
import sys

import mindspore as ms
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora.training.callbacks.common import report_event
from mindlora.training.callbacks.registry import LoraCheckpoint, RunReport, Trackers
from mindlora.training.run_configuration import remember_configuration
from tests.support.scripted_runs import Report, StopAt, train

LOSSES = [3.0, 2.5, 2.0, 1.5, 1.0]
CONFIGURATION = {"optimizer": {"type": "AdamW", "betas": [0.9, 0.95]}, "seed": 7, "load_checkpoint": ""}
NAMES = ["swanlab", "wandb", "mlflow", "tensorboard"]
EVENT, ANSWERS = "The loss is high.", [{"prompt": "Who?", "answer": "A model."}]


class Tell(ms.Callback):
    """Reports an event at step 4, and answers when the run ends; notes who handles Ctrl-C at each step."""

    def __init__(self):
        super().__init__()
        self.handlers = []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.handlers.append(signal.getsignal(signal.SIGINT))
        if params.cur_step_num == 4:
            report_event(params, "guard", EVENT)

    def on_train_end(self, run_context):
        params = run_context.original_args()
        params["training_answers"] = [{"step": params.cur_step_num, "answers": ANSWERS}]


class OfAdapter(ms.Callback):
    """Calls the callbacks of an adapter in a run with several, as EachAdapter does."""

    def __init__(self, name):
        super().__init__()
        self.callbacks = [RunReport(os.path.join("swept", name)), Trackers(NAMES, "several", adapter=name)]

    def on_train_begin(self, run_context):
        self._call("on_train_begin", run_context)

    def on_train_epoch_begin(self, run_context):
        self._call("on_train_epoch_begin", run_context)

    def on_train_step_end(self, run_context):
        self._call("on_train_step_end", run_context)

    def on_train_end(self, run_context):
        self._call("on_train_end", run_context)

    def _call(self, event, run_context):
        params = InternalCallbackParam()
        params.update(run_context.original_args())
        params["list_callback"] = self.callbacks
        for callback in self.callbacks:
            getattr(callback, event)(RunContext(params))


def run(folder):
    """Trains a run that is stopped and resumed, and callbacks of two adapters in one run.

    Returns whether the handler of Ctrl-C was another one while it trained or after that.
    """
    remember_configuration(CONFIGURATION)

    def callbacks(**resume):
        tracking = Trackers(NAMES, name="first", tags=["tiny", "cpu"])
        return [LoraCheckpoint(2, "saved", **resume), RunReport(folder), tracking]

    held_out = Report("held_out_loss", {2: 0.75, 4: 0.5})
    train([held_out, *callbacks(), StopAt(3)], LOSSES)
    tell, handler = Tell(), signal.getsignal(signal.SIGINT)
    train([held_out, tell, *callbacks(resume=os.path.join("saved", "step_2"))], LOSSES, skip=2)
    train([OfAdapter("small"), OfAdapter("large")], LOSSES[:2])
    return set(tell.handlers) != {handler} or signal.getsignal(signal.SIGINT) is not handler


def found_by_wandb():
    """Returns, for each file of an offline run in order, its run and the rows, alerts and artifacts in it."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    runs = []
    for path in sorted(glob.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
        found = {"rows": [], "alerts": [], "artifacts": [], "config": {}}
        with WBDataStoreReader() as reader:
            reader.open(path)
            for content in iter(reader.scan, None):
                record = Record.FromString(content)
                kind = record.WhichOneof("record_type")
                if kind == "run" and "id" not in found:
                    run = record.run
                    found.update(id=run.run_id, name=run.display_name, group=run.run_group, project=run.project)
                    found["tags"] = list(run.tags)
                elif kind == "config":
                    found["config"].update({item.key: json.loads(item.value_json) for item in record.config.update})
                elif kind == "history":
                    items = record.history.item
                    row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                    found["rows"].append({key: value for key, value in row.items() if not key.startswith("_")})
                elif kind == "alert":
                    found["alerts"].append([record.alert.title, record.alert.text])
                elif kind == "request" and record.request.HasField("log_artifact"):
                    found["artifacts"].append(record.request.log_artifact.artifact.name)
                elif kind == "artifact":
                    found["artifacts"].append(record.artifact.name)
                elif kind == "exit":
                    found["exit_code"] = record.exit.exit_code
        runs.append(found)
    return runs


def found_by_swanlab():
    """Returns, for each offline run in order, what it is called, its scalars and its texts and pages."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    runs = []
    for path in sorted(glob.glob("swanlog/run-*/run-*.swanlab"), key=os.path.getmtime):
        found = {"scalars": [], "media": []}
        reader = DataStoreReader()
        reader.open(path)
        for content in reader:
            record = Record.FromString(content)
            if record.HasField("start"):
                start = record.start
                found.update(id=start.id, name=start.name, project=start.project, tags=list(start.tags))
            elif record.HasField("scalar"):
                scalar = record.scalar
                found["scalars"].append([scalar.key, scalar.step, scalar.value.number])
            elif record.HasField("media"):
                kind = "html" if record.media.key.endswith("report") else "text"
                items = [item.filename for item in record.media.value.items]
                paths = [os.path.join(os.path.dirname(path), "media", kind, name) for name in items]
                texts = [pathlib.Path(each).read_text(encoding="utf-8") for each in paths]
                found["media"].append([record.media.key, record.media.step, texts])
        with open(os.path.join(os.path.dirname(path), "files", "config.yaml"), encoding="utf-8") as file:
            found["config"] = file.read()
        runs.append(found)
    return runs


def found_by_mlflow():
    """Returns, for each run in order, its name, tags, parameters, metrics and artifacts."""
    from mlflow import MlflowClient

    client = MlflowClient()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    runs = []
    for run in client.search_runs(experiments, order_by=["attributes.start_time"]):
        key = run.info.run_id
        histories = {name: client.get_metric_history(key, name) for name in run.data.metrics}
        folders = [each.path for each in client.list_artifacts(key) if each.is_dir]
        files = [each.path for folder in ["", *folders] for each in client.list_artifacts(key, folder)]
        runs.append(
            {
                "id": key,
                "name": run.info.run_name,
                "status": run.info.status,
                "experiment": client.get_experiment(run.info.experiment_id).name,
                "tags": run.data.tags,
                "parameters": run.data.params,
                "metrics": {name: [[m.step, m.value] for m in history] for name, history in histories.items()},
                "artifacts": sorted(path for path in files if path not in folders),
            }
        )
    return runs


def main():
    """Trains, and writes what the trackers have."""
    folder = sys.argv[1]
    os.chdir(folder)
    changed = run(os.path.join(folder, "run"))
    found = {
        "took_interrupts": changed,
        "wandb": found_by_wandb(),
        "swanlab": found_by_swanlab(),
        "mlflow": found_by_mlflow(),
    }
    with open("found.json", "w", encoding="utf-8") as file:
        json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
