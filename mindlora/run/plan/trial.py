"""Two steps of a YAML's run on MindSpore's own Ascend backend, without an NPU: the results of compiler and planner.

Inputs that compiling and planning do not need are made up: the base's values, and training data that does not exist.
Callbacks that read values or save are left out. Everything is written to a temporary folder, which is removed.
"""

import copy
import dataclasses
import json
import os
import re
import tempfile
import time
from typing import Any, Dict, List, Optional, Tuple

import yaml

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.initializers import computed_from_base, freezes_b
from mindlora.core.yaml_file import PET, value_at
from mindlora.run.checks.data_rows import row_lengths
from mindlora.run.checks.pynative import is_pynative
from mindlora.run.dry_run import process
from mindlora.run.plan.division import Division
from mindlora.run.yaml_run import YamlRun
from mindlora.training.preference.settings import preference_settings

STEPS = 2
_PROGRAM = "mindlora.training.launch.trial"
# Suffixes of keys that hold paths.
_PATH_ENDINGS = ("dir", "path", "file", "files", "checkpoint", "data")
# Callbacks that save or show a run.
_OF_A_REAL_RUN = ("LoraCheckpoint", "Trackers")
_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pth", ".index.json")
# An error of MindSpore's compiler or runtime; ME is its Python side, whose errors end the program.
_LOGGED_ERROR = re.compile(r"^\[(?:ERROR|CRITICAL)\] (?!ME\()\w+\(.*?\[\S+:\d+\] (?P<text>.+)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of a run's first steps on one rank.

    Attributes:
        rank (int): The rank that was compiled, of ``devices``.
        steps (int): Completed steps, at most STEPS.
        error (str): The error that ended it; empty if it reached its last step.
        used (int): Peak bytes in use on the device by MindSpore's planner, without fragments, or None.
        actual (int): The same with fragments, or None.
        seconds (float): Its duration.
        made_up (bool): Whether the rows were made up, since the YAML's data does not exist.
    """

    rank: int
    devices: int
    steps: int
    error: str
    used: Optional[int]
    actual: Optional[int]
    seconds: float
    made_up: bool

    @property
    def passed(self) -> bool:
        """Whether the run compiled and reached its second step."""
        return self.steps >= STEPS and not self.error


def try_rank(config: Dict[str, Any], rank: int = 0) -> Trial:
    """Compiles the network of a training YAML with all its layers, as one rank, and lets the backend take two steps.

    Args:
        config (dict): The content of a complete MindFormers YAML without mistakes; it is not changed.
        rank (int): One of the YAML's devices.

    Raises:
        ConfigError: The YAML is none that MindFormers' Trainer trains on Ascend in graph mode, or rows for it cannot be
            made up.
        InstallationError: MindSpore's Ascend plugin, or a compiler for the stand-ins, is missing.
    """
    run = YamlRun(config)
    _check_can_be_tried(run)
    devices = Division.of_yaml(run).devices
    with tempfile.TemporaryDirectory(prefix="mindlora-trial-") as folder:
        tried, rows = trial_yaml(config, folder)
        paths = {name: os.path.join(folder, name) for name in ("run.yaml", "rows.json", "outcome.json")}
        with open(paths["run.yaml"], "w", encoding="utf-8") as file:
            yaml.safe_dump(tried, file)
        with open(paths["rows.json"], "w", encoding="utf-8") as file:
            json.dump(rows, file)
        began = time.monotonic()
        finished = process.run(
            _PROGRAM,
            *paths.values(),
            folder=folder,
            ranks=devices,
            rank=rank,
            environment={"LOG_MF_PATH": os.path.join(folder, "log")},
        )
        seconds = time.monotonic() - began
        steps, problem = _outcome(paths["outcome.json"], finished)
    return Trial(rank, devices, steps, problem, finished.peak_bytes, finished.reserved_bytes, seconds, bool(rows))


def with_devices(config: Dict[str, Any], count: int) -> Dict[str, Any]:
    """Returns a YAML's content for another number of devices, with data parallelism over those that remain.

    Raises ConfigError if the divisions of layers, stages or tokens do not divide ``count``.
    """
    current = Division.of_yaml(YamlRun(config))
    others = current.model * current.pipeline * current.context
    if count < 1 or count % others:
        raise ConfigError(
            f"--devices is {count}, and the YAML divides the model among {others}: give a multiple of {others}."
        )
    changed = copy.deepcopy(config)
    changed["use_parallel"] = count > 1
    changed["parallel_config"] = {**(config.get("parallel_config") or {}), "data_parallel": count // others}
    return changed


def _check_can_be_tried(run: YamlRun) -> None:
    """Raises ConfigError unless the YAML is one whose training is compiled for Ascend."""
    target = run.setting("context.device_target")
    if target != "Ascend":
        raise ConfigError(
            f"context.device_target is {target}, and MindSpore's Ascend backend compiles runs on Ascend. Set it to "
            "Ascend."
        )
    if is_pynative(run.config) or not run.in_graph_mode:
        raise ConfigError(
            "The run is in PyNative mode, in which nothing is compiled before it runs. Try a run in graph mode "
            "(context.mode: 0)."
        )
    if not run.trains:
        raise ConfigError(f"run_mode is {run.mode!r}, and only training is tried. Set run_mode: finetune.")


def trial_yaml(config: Dict[str, Any], folder: str) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Returns the YAML that the trial runs, and the rows that it makes up.

    The YAML is the run's without base, LoraCheckpoint and Trackers, and with its output in ``folder``.
    The rows are path of a MindRecord -> {"columns": name -> shape, "count": rows, "tokens": how many tokens there are,
    ...}.
    """
    tried = copy.deepcopy(config)
    _make_paths_absolute(tried)
    tried.update(output_dir=os.path.join(folder, "output"), load_checkpoint="", auto_trans_ckpt=False)
    tried.update(resume_training=False, do_eval=False, src_strategy_path_or_dir="")
    tried.pop("checkpoint", None)
    tried.pop("remote_save_url", None)
    if tried.get("pretrained_model_dir"):
        tried["pretrained_model_dir"] = _without_weights(tried["pretrained_model_dir"], folder)
    tried["runner_config"] = {**tried["runner_config"], "epochs": STEPS, "sink_size": 1}
    pet = value_at(tried, PET) or {}
    init = pet.get("lora_init")
    if computed_from_base(init):
        # It begins with the base's values and does not change shapes.
        del pet["lora_init"]
    if freezes_b(init):
        pet["freeze_include"] = [*(pet.get("freeze_include") or ()), "*_lora_b"]
    callbacks = [callback for callback in tried.get("callbacks") or [] if callback.get("type") not in _OF_A_REAL_RUN]
    tried["callbacks"] = callbacks
    for callback in callbacks:
        callback.pop("directory", None)
    return tried, _fill_data(tried, os.path.join(folder, "made_up", "rows.mindrecord"))


def _make_paths_absolute(node: Any) -> None:
    """Makes relative paths that exist absolute, in place: the trial works in another folder."""
    if isinstance(node, list):
        for item in node:
            _make_paths_absolute(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            is_path = str(key).endswith(_PATH_ENDINGS)
            if is_path and isinstance(value, str) and os.path.exists(value):
                node[key] = os.path.abspath(value)
            elif is_path and isinstance(value, list) and all(isinstance(path, str) for path in value):
                node[key] = [os.path.abspath(path) if os.path.exists(path) else path for path in value]
            else:
                _make_paths_absolute(value)


def _without_weights(path: str, folder: str) -> str:
    """Returns a folder with the files of a model's folder except its weights, which the trial does not load."""
    if not os.path.isdir(path):
        return path
    links = os.path.join(folder, "model")
    os.makedirs(links)
    for name in os.listdir(path):
        if not name.endswith(_WEIGHTS):
            os.symlink(os.path.join(path, name), os.path.join(links, name))
    return links


def _fill_data(config: Dict[str, Any], path: str) -> Dict[str, Any]:
    """Names made-up rows for each missing MindRecord, in place; returns the rows to write."""
    missing = False
    run = YamlRun(config)
    loader = run.at("train_dataset.data_loader") or {}
    if loader.get("type") == "MindDataset" and run.train_data is None:
        loader.pop("dataset_files", None)
        loader["dataset_dir"] = path
        missing = True
    held_out = [(callback, "dataset_dir") for _, callback in run.callbacks_of("HeldOutLoss")]
    for node, key in [*held_out, *((adapter, "data") for adapter in run.adapters)]:
        if node.get(key) and not os.path.exists(node[key]):
            node[key] = path
            missing = True
    return {path: _rows(YamlRun(config))} if missing else {}


def _rows(run: YamlRun) -> Dict[str, Any]:
    """Returns the columns, and the rows that two steps need on all devices; raises ConfigError for other columns."""
    width = row_lengths(run)[-1]
    shape = [width]
    known = ["input_ids", "labels"]
    if run.preference is not None:
        # An unpacked preference: both answers with their prompt, and the mark of one pair or judgment.
        shape = [2, width]
        known = list(preference_settings(run.preference).columns)
    columns = run.columns or known
    other = [column for column in columns if column not in known]
    if other:
        raise ConfigError(
            f"train_dataset names no data that is there, and rows cannot be made up: input_columns has {other[0]}, and "
            f"rows with {', '.join(known)} can. Name the data: --train_dataset_dir PATH."
        )
    marks = {"pairs": [1], "judgments": [1]}
    division = Division.of_yaml(run)
    count = STEPS * run.rows * run.accumulation * division.data * division.micro_batches
    return {
        "columns": {column: marks.get(column, shape) for column in columns},
        "count": count,
        "tokens": run.model_config.get("vocab_size") or width,
        "labels": run.model_config.get("num_labels"),
        "begin": run.pet_config.get("alora_invocation_tokens") or [],
    }


def _outcome(path: str, finished: process.Finished) -> Tuple[int, str]:
    """Returns the number of completed steps, and the error that ended the trial, or ""."""
    logged = _LOGGED_ERROR.search(finished.output)
    if not os.path.exists(path):
        last: List[str] = [line for line in finished.output.splitlines() if line.strip()][-1:]
        said = logged["text"] if logged else "".join(last)
        return 0, f"MindSpore's process ended with exit code {finished.returncode} and no message. Its log says: {said}"
    with open(path, encoding="utf-8") as file:
        outcome = json.load(file)
    problem = outcome["error"]
    if problem and logged and logged["text"] not in problem:
        problem += f" Before that, MindSpore's log says: {logged['text']}"
    return outcome["steps"], problem
