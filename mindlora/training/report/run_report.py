"""RunReport: records a run as numbers in metrics.jsonl, and describes it on a page, report.html."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import time
from typing import Any, Dict, List, Mapping, Optional

import mindspore as ms
import numpy as np
import psutil
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister, template
from mindformers.tools.utils import get_output_root_path, get_real_group_size, get_real_rank
from mindformers.utils.tensorboard import get_tensorboard_writer
from mindspore import Callback
from mindspore.train import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora import __version__
from mindlora.core.fields import ignore_token_id, pad_token_id
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.training.callbacks.common import register, reported_metrics, step_record
from mindlora.training.log import logger
from mindlora.training.model.network import base_of, train_step_of
from mindlora.training.preference.settings import MEASURES
from mindlora.training.report.history import EARLIER_NAME, HELD_OUT_FIELDS, HistoryWriter
from mindlora.training.resume.training_state import total_steps
from mindlora.training.run_configuration import plain, run_configuration

REPORT_NAME = "report.html"
# The report is rewritten after this many times the time that writing it took, and when the run ends.
_PAUSE = 20
# The recorded fields that MFLossMonitor does not send to TensorBoard.
_TO_TENSORBOARD = (*("tokens_per_second", "bytes_exchanged", "memory_bytes", "forgetting"), *MEASURES, *HELD_OUT_FIELDS)
# Node of the YAML -> the MindFormers module that holds the class that its "type" names.
_NODES = {
    "optimizer": MindFormerModuleType.OPTIMIZER,
    "lr_schedule": MindFormerModuleType.LR,
    "runner_wrapper": MindFormerModuleType.WRAPPER,
    "model.model_config": MindFormerModuleType.CONFIG,
}
# Number of rows of the data to inspect.
_ROWS = 256


@register
class RunReport(Callback):
    """Records every step of a run in metrics.jsonl, and shows the run in report.html; mindlora-run adds it itself.

    metrics.jsonl is complete after every step. report.html is written after LoraCheckpoint has saved, and when the run
    ends; ``mindlora report`` writes it at any time. Rank 0 writes both files. If the YAML has
    tensorboard.tensorboard_dir, TensorBoard gets the same numbers, except those that MFLossMonitor sends.

    Args:
        directory (str): Folder to write to. Default: None, the output folder of the run.
    """

    def __init__(self, directory: Optional[str] = None):
        super().__init__()
        self.directory = os.path.abspath(directory or get_output_root_path())
        self.history = self.tensorboard = None
        self.step_before = 0
        self.time_before = 0.0
        self.events_written = self.answers_written = 0
        self.next_report = 0.0
        self.writes_page = get_real_rank() == 0 and importlib.util.find_spec("jinja2") is not None
        if get_real_rank() == 0 and not self.writes_page:
            logger.warning(
                "RunReport writes no report.html, as Jinja2 is not installed: pip install 'mindlora[report]'. "
                "metrics.jsonl is written."
            )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Begins the history."""
        # Not when training begins: a resumed run may not know its step by then.
        if self.history is not None or get_real_rank() != 0:
            return
        params = run_context.original_args()
        self.step_before = params.cur_step_num
        self.time_before = time.time()
        self.history = HistoryWriter(self.directory, self.step_before)
        if self.history.moved:
            logger.warning(
                "%s held %d records of an earlier run after step %d; they are now in %s. Delete that file once nobody "
                "needs it.",
                self.history.path,
                self.history.moved,
                self.step_before,
                EARLIER_NAME,
            )
        self.history.append(self.step_before, run=_described(params))
        self.tensorboard = get_tensorboard_writer()

    def on_train_step_end(self, run_context: RunContext) -> None:
        """Records the step, and writes the report if a checkpoint has been saved."""
        if self.history is None:
            return
        params = run_context.original_args()
        step = params.cur_step_num
        now = time.time()
        self._record(step, **self._numbers(params, now))
        metrics = reported_metrics(params)
        for kind in (HELD_OUT_FIELDS, ("forgetting",)):
            measured = {name: metrics[name] for name in kind if metrics.get(name) is not None}
            if measured:
                self._record(step, **measured)
        health = params.get("adapter_health")
        if health is not None and health.step == step:
            self._record(step, health=health.to_json())
        self._record_rest(params)
        self.step_before = step
        self.time_before = now
        has_saved = any(getattr(callback, "last_saved", None) == step for callback in params.list_callback)
        if has_saved and now >= self.next_report:
            self._write_page()

    def on_train_end(self, run_context: RunContext) -> None:
        """Writes the report."""
        if self.history is None:
            return
        self._record_rest(run_context.original_args())
        self.history.close()
        self._write_page()
        logger.info("The run is in %s.", os.path.join(self.directory, REPORT_NAME if self.writes_page else ""))

    def _numbers(self, params, now):
        """Returns the fields of the step that has ended."""
        record = step_record(params)
        exchange = getattr(train_step_of(params.train_network), "exchange", None)
        # With data sinking, several steps are reported at once, and the record describes the last.
        steps = params.cur_step_num - self.step_before
        seconds = now - self.time_before
        return {
            "time": now,
            "loss": record.loss,
            "learning_rate": record.learning_rate,
            "gradient_norm": record.gradient_norm,
            "tokens": record.tokens,
            "tokens_per_second": None if record.tokens is None else record.tokens * steps / max(seconds, 1e-6),
            "bytes_exchanged": None if exchange is None else exchange.bytes_per_step,
            "memory_bytes": _memory(),
            "skipped": record.skipped,
            **(record.measures or {}),
        }

    def _record(self, step, **record):
        self.history.append(step, **record)
        for name in _TO_TENSORBOARD:
            if self.tensorboard is not None and record.get(name) is not None:
                self.tensorboard.add_scalar(name.replace("_", "-"), record[name], global_step=step)

    def _record_rest(self, params):
        """Records new events and answers."""
        events = params.get("training_events") or []
        answers = params.get("training_answers") or []
        for event in events[self.events_written :]:
            self._record(event["step"], event=event["kind"], message=event["message"])
        for samples in answers[self.answers_written :]:
            self._record(samples["step"], answers=samples["answers"])
        self.events_written = len(events)
        self.answers_written = len(answers)

    def _write_page(self):
        if not self.writes_page:
            return
        from mindlora.training.report import write_report

        started = time.time()
        try:
            write_report([self.directory], os.path.join(self.directory, REPORT_NAME))
        except Exception as error:
            # A run that takes days must not fail because of its report.
            logger.warning("The report could not be written (%s); make it with mindlora report.", error)
        self.next_report = time.time() + _PAUSE * (time.time() - started)


def _described(params):
    """Returns the record "run", without parts that cannot be determined: a run must not fail because of them."""
    try:
        return describe(params)
    except Exception as error:
        logger.warning(
            "RunReport cannot describe the run (%s: %s), so report.html will show its numbers alone. Read its settings "
            "in the YAML.",
            type(error).__name__,
            error,
        )
        return {"time": time.time(), "total_steps": total_steps(params)}


def _memory():
    """Returns the bytes of the device's peak allocation so far, or of the process's memory on a CPU."""
    if ms.get_context("device_target") == "CPU":
        return psutil.Process().memory_info().rss
    # The current allocation, between two steps, lacks the activations, gradients and logits of a step.
    return ms.runtime.max_memory_allocated()


@register
class LossCurve(RunReport):
    """The former name of RunReport; inactive if a RunReport, such as mindlora-run's, writes to the same folder.

    Args:
        directory (str): Folder to write to. Default: None, the output folder of the run.
    """

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        """Logs the callback's new name; begins the history if no RunReport writes it."""
        if get_real_rank() == 0:
            _say_the_new_name()
        others = [other for other in run_context.original_args().list_callback if type(other) is RunReport]
        if all(other.directory != self.directory for other in others):
            super().on_train_epoch_begin(run_context)


@functools.lru_cache(maxsize=None)
def _say_the_new_name() -> None:
    """Warns once per process: in a run with several adapters, each has its own LossCurve."""
    logger.warning(
        '"LossCurve" is called "RunReport" now, which mindlora-run adds by itself; this name goes with the next '
        "version. The losses are in metrics.jsonl and report.html; loss_curve.json and loss_curve.png are not written "
        "any more."
    )


def describe(params: InternalCallbackParam) -> Dict[str, Any]:
    """Returns the record "run" of a history, without a configuration if mindlora-run did not start the run."""
    configuration = params.get("run_configuration") or run_configuration()
    facts = params.get("run_facts") or _facts_of_configuration(params, configuration)
    return {
        "time": time.time(),
        "total_steps": total_steps(params),
        **facts,
        "versions": _versions(),
        "machine": _machine(),
    }


def _facts_of_configuration(params: InternalCallbackParam, configuration: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns a run's configuration, the defaults of its keys, and a summary of its data."""
    return {
        "configuration": configuration,
        "defaults": known_defaults(configuration),
        "data": _data(params, configuration),
    }


def known_defaults(configuration: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns {dotted key: default} of the keys whose default is stated by a class that the configuration names."""
    defaults: Dict[str, Any] = {}
    for node in template.Config.__subclasses__():
        # "general_config" is the name of the keys at the top.
        start = "" if node is template.GeneralConfig else f"{node._name}."
        defaults.update({start + key: getattr(node, key) for key in vars(node) if not key.startswith("_")})
    for path, kind in _NODES.items():
        node = _node(configuration, path)
        defaults.update({f"{path}.{key}": value for key, value in _arguments_of(kind, node).items()})
    for callback in configuration.get("callbacks") or []:
        arguments = _arguments_of(MindFormerModuleType.CALLBACK, callback)
        defaults.update({f"callbacks.{callback.get('type')}.{key}": value for key, value in arguments.items()})
    for field in dataclasses.fields(PetLoraConfig):
        if field.default is not dataclasses.MISSING:
            defaults[f"model.model_config.pet_config.{field.name}"] = field.default
    return {key: plain(value) for key, value in defaults.items()}


def _arguments_of(kind: MindFormerModuleType, node: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns {argument: default} of the class that a YAML node names, and of its base classes."""
    try:
        cls = MindFormerRegister.get_cls(kind, node.get("type"))
    except ValueError:
        return {}
    defaults = {}
    for base in reversed(cls.__mro__):
        for name in ("__new__", "__init__"):
            constructor = inspect.unwrap(getattr(vars(base).get(name), "__func__", vars(base).get(name)))
            if inspect.isfunction(constructor):
                for argument in inspect.signature(constructor).parameters.values():
                    if argument.default is not argument.empty:
                        defaults[argument.name] = argument.default
    return defaults


def _node(configuration: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    for key in path.split("."):
        configuration = configuration.get(key) or {}
    return configuration


def _data(params, configuration) -> Dict[str, Any]:
    loader = _node(configuration, "train_dataset.data_loader")
    facts = {
        "training data": loader.get("dataset_dir"),
        "rows in a step, on each device": params.train_dataset.get_batch_size(),
        "steps in an epoch": params.batch_num,
        "epochs": params.epoch_num,
    }
    if loader.get("type") == "MindDataset" and loader.get("dataset_dir"):
        facts.update(_of_rows(mindrecord_files(loader["dataset_dir"]), base_of(params.train_network).config))
    return {name: fact for name, fact in facts.items() if fact}


def _of_rows(files: List[str], config: Any) -> Dict[str, Any]:
    """Returns figures about the first rows of the training data."""
    data = ms.dataset.MindDataset(files, shuffle=False)
    rows = data.get_dataset_size()
    if not {"input_ids", "labels"} <= set(data.get_col_names()):
        return {"rows": rows}
    first = list(data.take(_ROWS).create_dict_iterator(num_epochs=1, output_numpy=True))
    tokens = np.stack([row["input_ids"] for row in first])
    labels = np.stack([row["labels"] for row in first])
    return {
        "rows": rows,
        "tokens in a row": tokens.shape[1],
        f"padding in the first {len(first)} rows": f"{np.mean(tokens == pad_token_id(config)):.1%}",
        f"tokens in the loss of the first {len(first)} rows": f"{np.mean(labels != ignore_token_id(config)):.1%}",
    }


def _versions() -> Dict[str, str]:
    names = ("mindspore", "mindformers", "numpy", "safetensors")
    versions = {name: importlib.metadata.version(name) for name in names}
    return {"mindlora": __version__, **versions, "Python": platform.python_version()}


def _machine() -> Dict[str, Any]:
    return {
        "device": ms.get_context("device_target"),
        "mode": "graph" if ms.get_context("mode") == ms.GRAPH_MODE else "PyNative",
        "processes": get_real_group_size(),
        "system": f"{platform.system()} {platform.machine()}",
        "CPU cores": os.cpu_count(),
        "memory of the machine": f"{psutil.virtual_memory().total / 1024**3:.0f} GiB",
    }
