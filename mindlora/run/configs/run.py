"""The YAML of a training run for a model whose folder was read."""

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Tuple

from mindlora.models.pet_keys import PRESETS, preset_fields
from mindlora.run.configs.comments import commands_of, comments_of, header_of, notes_on
from mindlora.run.configs.folder import ModelFolder
from mindlora.run.configs.model import NPU, model_nodes, seq_length_of
from mindlora.run.configs.request import EPOCHS, Batch, Request, check_request, loads_folder, row_length
from mindlora.run.configs.text import yaml_text
from mindlora.run.plan.run import read_run
from mindlora.training.preference.settings import LOSSES

# Where no recipe says: those of the YAMLs in configs/.
_ADAPTER = {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05}
_LEARNING_RATE = 1e-4
_TRAIN_STEP = {"type": "LoraTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True, "max_grad_norm": 1.0}


@dataclasses.dataclass(frozen=True)
class Draft:
    """The YAML of a run.

    Attributes:
        content (dict): Its nodes.
        parameters, trained (int): Elements of all parameters, and of those that are trained.
        steps (int): Steps of the run, or None without data.
        notes (tuple of str): What else the user should know.
        commands (tuple of str): What to do next, in order.
        text (str): The YAML.
    """

    content: Dict[str, Any]
    parameters: int
    trained: int
    steps: Optional[int]
    notes: Tuple[str, ...]
    commands: Tuple[str, ...]
    text: str


def draft_run(folder: ModelFolder, request: Request) -> Draft:
    """Returns the YAML of a run; raises ConfigError if the model does not train on the device, or not on the data."""
    check_request(folder, request)
    batch = Batch.of(request)
    content = _content(folder, request, batch)
    weights = read_run(content).weights
    parameters = sum(weight.count for weight in weights)
    trained = sum(weight.count for weight in weights if weight.trained)
    header = header_of(folder, request, batch, trained, parameters)
    text = yaml_text(header, content, comments_of(folder, request))
    notes = notes_on(folder, request)
    return Draft(content, parameters, trained, batch.steps, notes, commands_of(folder, request), text)


def _content(folder: ModelFolder, request: Request, batch: Batch) -> Dict[str, Any]:
    length = row_length(folder, request.rows) if request.rows else request.seq_length
    nodes = model_nodes(folder, request.device, seq_length_of(folder, length))
    fields, rate = _recipe(request.recipe)
    nodes["model"]["model_config"]["pet_config"] = {
        "pet_type": "lora",
        **fields,
        "target_modules": "all-linear",
        "param_init_type": "float32",
        "base_model_name_or_path": folder.path,
    }
    return {
        "seed": 42,
        "output_dir": "./output",
        "run_mode": "finetune",
        "load_checkpoint": folder.path if loads_folder(folder, request) else "",
        "load_ckpt_format": "safetensors",
        "auto_trans_ckpt": request.devices > 1,
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": folder.name},
        **_optimization(request, batch, rate),
        **_data(request),
        **_parallel(request),
        "callbacks": _callbacks(request, batch),
        **nodes,
        "runner_wrapper": _train_step(request),
    }


def _optimization(request: Request, batch: Batch, rate: float) -> Dict[str, Any]:
    on_npu = request.device == NPU
    nodes: Dict[str, Any] = {
        "runner_config": {
            "epochs": EPOCHS,
            "batch_size": batch.rows,
            "gradient_accumulation_steps": batch.accumulation,
            "sink_mode": on_npu,
        },
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "lr_schedule": {
            "type": "CosineWithWarmUpLR",
            "learning_rate": rate,
            "lr_end": 0.0,
            "warmup_ratio": 0.03,
            "total_steps": -1,
        },
    }
    if on_npu:
        nodes["runner_config"]["sink_size"] = 1
        nodes["recompute_config"] = {"recompute": True}
    return nodes


def _train_step(request: Request) -> Dict[str, Any]:
    loss = request.rows.loss if request.rows else None
    return {**_TRAIN_STEP, **({"preference": {"loss": loss}} if loss else {})}


def _data(request: Request) -> Dict[str, Any]:
    path = request.rows.path if request.rows else ""
    loss = request.rows.loss if request.rows else None
    dataset = {
        "data_loader": {"type": "MindDataset", "dataset_dir": path, "shuffle": True},
        "input_columns": list(LOSSES[loss].columns) if loss else ["input_ids", "labels"],
        "num_parallel_workers": 8 if request.device == NPU else 1,
        "drop_remainder": True,
    }
    task = {"type": "CausalLanguageModelDataset", "dataset_config": dataset}
    return {"train_dataset": dataset, "train_dataset_task": task}


def _recipe(name: Optional[str]) -> Tuple[Mapping[str, Any], float]:
    """Returns what a recipe says of the adapter, and its learning rate; raises ConfigError if it is not known."""
    if name is None:
        return _ADAPTER, _LEARNING_RATE
    return preset_fields(name), float(PRESETS[name]["learning_rate"])


def _parallel(request: Request) -> Dict[str, Any]:
    if request.devices == 1:
        return {"use_parallel": False}
    return {
        "use_parallel": True,
        "parallel": {
            "parallel_mode": 1,
            "full_batch": True,
            "gradients_mean": False,
            "enable_parallel_optimizer": False,
            "strategy_ckpt_config": {"only_trainable_params": False},
        },
        "parallel_config": {"data_parallel": request.devices, "model_parallel": 1, "pipeline_stage": 1},
    }


def _callbacks(request: Request, batch: Batch) -> List[Dict[str, Any]]:
    save: Dict[str, Any] = {"type": "LoraCheckpoint", "save_steps": batch.save_steps, "keep_last": 3}
    callbacks: List[Dict[str, Any]] = [{"type": "MFLossMonitor"}]
    if request.rows and request.rows.held_out:
        held_out = {"type": "HeldOutLoss", "dataset_dir": request.rows.held_out, "every_steps": batch.save_steps}
        callbacks.append(held_out)
        save["best_metric"] = "held_out_loss"
    return [*callbacks, save]
