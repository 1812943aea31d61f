"""What the report of a run says of it besides its numbers: configuration, defaults, data, versions and machine."""

import dataclasses
import importlib.metadata
import inspect
import os
import platform
import time
from typing import Any, Dict, List, Mapping

import mindspore as ms
import numpy as np
import psutil
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister, template
from mindformers.tools.utils import get_real_group_size
from mindspore.train.callback._callback import InternalCallbackParam

from mindlora import __version__
from mindlora.core.fields import ignore_token_id, pad_token_id
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.training.model.network import base_of
from mindlora.training.resume.training_state import total_steps
from mindlora.training.run_configuration import plain, run_configuration

# Node of the YAML -> where MindFormers keeps the class that its "type" names.
_NODES = {
    "optimizer": MindFormerModuleType.OPTIMIZER,
    "lr_schedule": MindFormerModuleType.LR,
    "runner_wrapper": MindFormerModuleType.WRAPPER,
    "model.model_config": MindFormerModuleType.CONFIG,
}
# Rows of the data that are looked at.
_ROWS = 256


def describe(params: InternalCallbackParam) -> Dict[str, Any]:
    """Returns the record "run" of a history; without a configuration if mindlora-run did not start the run."""
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
    """Returns what a configuration says of a run, with the defaults of its keys, and what its data holds."""
    return {
        "configuration": configuration,
        "defaults": known_defaults(configuration),
        "data": _data(params, configuration),
    }


def known_defaults(configuration: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns {dotted key: default} of those keys whose default a class states that the configuration names."""
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
    """Returns {argument: default} of the class that a node of the YAML names, and of those it inherits from."""
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
    """Returns what the first rows of the training data hold."""
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
