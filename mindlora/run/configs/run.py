"""The YAML of a training run for a model's folder: the request, its consequences, and its limits."""

import dataclasses
import math
import os
import shlex
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT, check_number
from mindlora.core.formats.mindrecord_files import mindrecord_files, row_count
from mindlora.core.yaml_file import yaml_text
from mindlora.data.pipeline import held_out_name
from mindlora.models.lora_config import PRESETS, preset_fields
from mindlora.run.checks.cpu import dtype_key, why_not_held
from mindlora.run.checks.data_rows import FirstRows
from mindlora.run.configs.folder import CPU, NPU, ModelFolder, model_nodes, seq_length_of
from mindlora.run.keys import MODEL
from mindlora.run.plan.run import read_run
from mindlora.run.yaml_run import YamlRun
from mindlora.training.preference.rules import ANSWERS
from mindlora.training.preference.settings import LOSSES

# The facts about data that a run needs: the number of rows, and the tokens of each.

_ENDING = ".mindrecord"
# The YAML's comments for its reader: its purpose, the commands that use it, what to change.

_COMMENTS = {
    "runner_config.epochs": "how often the data is read",
    "lr_schedule.learning_rate": "of all settings the one to try first; full fine-tuning takes about a tenth",
    "lr_schedule.total_steps": "computed from the data and epochs",
    "optimizer.weight_decay": "an adapter is small: none is needed",
    "model.model_config.pet_config.target_modules": "better than attention alone (Schulman et al., 2025)",
    "model.model_config.pet_config.lora_rank": "more for more data",
    "model.model_config.pet_config.param_init_type": "the optimizer changes A and B in small steps",
    "parallel.gradients_mean": "the loss is already the mean over the rows of all NPUs",
    "parallel.parallel_mode": "data parallel: each NPU has the whole model; 1 divides it (docs/sharding.md)",
    "runner_wrapper.preference.loss": "docs/preferences.md has the others, and beta",
    "runner_wrapper.rl": "docs/rl.md has all keys",
    "runner_wrapper.rl.num_generations": "answers to each prompt",
    "runner_wrapper.rl.prompts_per_step": "prompts whose answers make a step of the optimizer",
    "runner_wrapper.rl.max_completion_length": "tokens of an answer",
    "runner_wrapper.rl.beta": "above 0 keeps the policy near the base",
    "context.max_device_memory": "of an NPU with 64 GB",
    "recompute_config.recompute": "False is faster, and takes more memory (mindlora plan)",
    "model.model_config.seq_length": "the rows have one token more",
}


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a MindRecord, or of a folder of them.

    Attributes:
        count (int): Number of rows.
        tokens (int): Tokens of each row; for an unpacked pair of answers, of either answer.
        of_model (int): Rows of the model for each row: 2 for an unpacked pair of answers.
        loss (str): The loss for such preferences, or None if the rows have labels.
        held_out (str): The MindRecord of held-out rows that `mindlora data --holdout` wrote beside it, or None.
    """

    path: str
    count: int
    tokens: int
    of_model: int
    loss: Optional[str]
    held_out: Optional[str]


def read_rows(path: str, first_rows: FirstRows) -> Rows:
    """Returns the facts about a MindRecord or a folder of them; ``first_rows`` reads the first rows of a MindRecord.

    Raises ConfigError if it does not exist, cannot be read, or its rows have no input_ids.
    """
    files = [file for file in mindrecord_files(path) if file.endswith(_ENDING) and os.path.isfile(file)]
    if not files:
        raise ConfigError(
            f"--data {path} is neither a MindRecord nor a folder of them. Convert your rows first: mindlora data "
            "alpaca --input rows.jsonl --output rows.mindrecord --tokenizer FOLDER --seq-length N"
        )
    counts = [row_count(file) for file in files]
    row = next(first_rows(files[0], 1), {})
    if None in counts or "input_ids" not in row:
        lacking = f"no column input_ids in {files[0]}" if None not in counts else "a MindRecord without its .db"
        raise ConfigError(f"--data {path}: there is {lacking}. Convert the data again.")
    held_out = held_out_name(path)
    exists = path.endswith(_ENDING) and os.path.isfile(held_out)
    *of_model, tokens = row["input_ids"].shape
    loss = ("dpo" if "pairs" in row else "kto") if ANSWERS in row else None
    count = sum(filter(None, counts))
    return Rows(path, count, tokens, math.prod(of_model), loss, held_out if exists else None)


EPOCHS = 3
# Rows of a step: enough for a stable gradient, few enough that small data has many steps.
_ROWS_PER_STEP = 16
_BATCH = {CPU: 1, NPU: 4}
_SAVE_STEPS = 500


@dataclasses.dataclass(frozen=True)
class Request:
    """The user's request for a run.

    Attributes:
        output (str): Path of its YAML, for the commands in its header.
        device (str): "cpu" or "npu".
        devices (int): Number of devices.
        seq_length (int): Tokens of a row. Default: None, the tokens of ``rows``, or 2048 if the model takes as many.
        recipe (str): One of config.PRESETS. Default: None.
        rows (Rows): The data. Default: None.
        prompts (str): A file of prompts, whose answers are rated, in place of data. Default: None.
        rewards (sequence of str): The rewards, as for rl.reward_funcs. Default: none.
        teacher (str or dict): The teacher whose log-probabilities the run learns, as for rl.teacher. Default: None.
    """

    output: str
    device: str
    devices: int = 1
    seq_length: Optional[int] = None
    recipe: Optional[str] = None
    rows: Optional[Rows] = None
    prompts: Optional[str] = None
    rewards: Sequence[str] = ()
    teacher: Any = None


@dataclasses.dataclass(frozen=True)
class Batch:
    """The rows of a step, and the number of steps of a run.

    Attributes:
        rows (int): Rows on each device at a time.
        accumulation (int): Number of these batches in a step.
        per_step (int): Rows of a step on all devices.
        per_epoch (int): Steps of an epoch, or None without data.
    """

    rows: int
    accumulation: int
    per_step: int
    per_epoch: Optional[int]

    @classmethod
    def of(cls, request: Request) -> "Batch":
        """Returns the batch of a run."""
        available = request.rows.count if request.rows else _ROWS_PER_STEP * request.devices
        of_model = request.rows.of_model if request.rows else 1
        rows = max(1, min(_BATCH[request.device] // of_model, available // request.devices))
        # On several devices, a batch of 4 rows on each suffices.
        accumulation = max(1, min(_ROWS_PER_STEP, available) // rows) if request.devices == 1 else 1
        per_step = rows * accumulation * request.devices
        return cls(rows, accumulation, per_step, request.rows.count // per_step if request.rows else None)

    @property
    def steps(self) -> Optional[int]:
        """Steps of the run, or None without data."""
        return None if self.per_epoch is None else self.per_epoch * EPOCHS

    @property
    def save_steps(self) -> int:
        """Steps between two saves."""
        return _SAVE_STEPS if self.per_epoch is None else min(_SAVE_STEPS, max(1, self.per_epoch))


def check_request(folder: ModelFolder, request: Request) -> None:
    """Raises ConfigError if the model cannot be trained as requested."""
    check_number(request.devices, "--devices", COUNT)
    if request.seq_length is not None:
        check_number(request.seq_length, "--seq-length", COUNT)
    if request.rows and request.seq_length not in (None, row_length(folder, request.rows)):
        raise ConfigError(
            f"--seq-length is {request.seq_length}, but the rows of {request.rows.path} have {request.rows.tokens} "
            f"tokens, which are of seq_length {row_length(folder, request.rows)}. Leave it out."
        )
    if bool(request.prompts) != bool(request.rewards or request.teacher):
        raise ConfigError(
            "A run that learns from its own answers has prompts, and rewards or a teacher. Give --prompts, and "
            "--rewards or --teacher."
        )
    if request.prompts and (request.rows or request.devices > 1):
        what = f"--data {request.rows.path}" if request.rows else f"--devices {request.devices}"
        raise ConfigError(f"A run that learns from rewards has prompts for its data, and one device. Leave {what} out.")
    if request.device == CPU and request.devices > 1:
        raise ConfigError(
            f"--devices is {request.devices}, and MindSpore divides nothing among CPU processes. Use one."
        )
    if request.rows and request.rows.count < request.devices:
        raise ConfigError(
            f"{request.rows.path} has {request.rows.count} rows, too few for {request.devices} devices. Give more data."
        )


def row_length(folder: ModelFolder, rows: Rows) -> int:
    """Returns the seq_length of the rows."""
    return rows.tokens if folder.architecture.takes_shifted_labels else rows.tokens - 1


def header_of(folder: ModelFolder, request: Request, batch: Batch, trained: int, parameters: int) -> List[str]:
    """Returns the lines at the beginning; ``trained`` of ``parameters`` elements train."""
    return [
        f"Fine-tunes {folder.name} ({folder.architecture.title}) with LoRA on {_where(request)}.",
        f"Written by mindlora configs --from {folder.path}.",
        "",
        *(f"  {command}" for command in commands_of(folder, request)),
        "",
        f"trainable parameters: {trained:,} of {parameters:,} ({100 * trained / parameters:.4f} %)",
        *_about_steps(request, batch),
        f"What it takes, and what to change so that it fits: mindlora plan {request.output}",
    ]


def notes_on(folder: ModelFolder, request: Request) -> Tuple[str, ...]:
    """Returns notes for the user on the model and the data."""
    notes = []
    if folder.unstated_end is not None:
        notes.append(
            f"the chat template ends the assistant's turns with {folder.unstated_end}, but the folder does not say "
            "that the model stops there: eos_token_id of the YAML has it too"
        )
    if request.rows and request.rows.loss:
        notes.append(
            f"{request.rows.path} holds preferences, which the run learns with the loss {request.rows.loss} "
            "(runner_wrapper.preference; docs/preferences.md has the others)"
        )
    return tuple(notes)


def _notes_on_decoding(folder: ModelFolder, content: Mapping[str, Any]) -> List[str]:
    """Returns notes on quantized weights of the folder, and on how the run holds them."""
    run = YamlRun(content)
    held = run.model.get(dtype_key(run), "float32")
    if not folder.decoded:
        return []
    return [*folder.decoded, f"the run holds the decoded weights in {held} ({MODEL}.{dtype_key(run)})"]


def commands_of(folder: ModelFolder, request: Request) -> Tuple[str, ...]:
    """Returns the commands from this YAML to an answer of the adapter."""
    model = shlex.quote(folder.path)
    run = f"mindlora-run --config {shlex.quote(request.output)}"
    if request.devices > 1:
        workers = f"--worker_num={request.devices} --local_worker_num={request.devices}"
        run = f"msrun {workers} --join=True $(which mindlora-run) --config {shlex.quote(request.output)}"
    commands = []
    if request.prompts:
        run = f"mindlora rl {shlex.quote(request.output)}"
    elif request.rows is None:
        length = seq_length_of(folder, request.seq_length)
        rows = "--input rows.jsonl --output rows.mindrecord"
        commands.append(f"mindlora data alpaca {rows} --tokenizer {model} --seq-length {length}")
        run += " --train_dataset_dir rows.mindrecord"
    commands.append(run)
    if folder.architecture.legacy or folder.architecture.served:
        answer = f"mindlora generate --model {model} --adapter output/lora_checkpoint/best --prompt 'Hello'"
        if request.rows is None and not request.prompts:
            answer += " --template alpaca"
        elif request.rows and not request.rows.loss:
            answer += "  # for rows of mindlora data alpaca: --template alpaca"
        commands.append(answer)
    return tuple(commands)


def _where(request: Request) -> str:
    if request.device == CPU:
        return "a CPU"
    return "one NPU" if request.devices == 1 else f"{request.devices} NPUs"


def _about_steps(request: Request, batch: Batch) -> List[str]:
    if request.prompts:
        judges = [*request.rewards, *(["a teacher"] if request.teacher else [])]
        return [f"a step: {_PROMPTS * _GENERATIONS} answers, which are rated by {', '.join(judges)}"]
    if request.rows is None:
        return [f"a step: {batch.per_step} rows"]
    return [
        f"data: {request.rows.count:,} rows of {request.rows.tokens:,} tokens; a step: {batch.per_step} rows; steps: "
        f"{batch.per_epoch:,} in an epoch, {batch.steps:,} in all"
    ]


def comments_of(folder: ModelFolder, request: Request) -> Dict[str, str]:
    """Returns dotted key -> its comment."""
    comments = dict(_COMMENTS)
    rows = "rows at a time; more are faster while the memory suffices"
    comments["runner_config.batch_size"] = rows if request.device == CPU else "rows on each NPU at a time"
    if request.devices == 1:
        comments["runner_config.gradient_accumulation_steps"] = "so many batches make a step"
    if folder.ids.pad == folder.ids.eos:
        comments["model.model_config.pad_token_id"] = "the token that ends a text, with which mindlora data pads"
    if request.recipe:
        of_recipe = f"with alpha, dropout and rate, of the recipe {request.recipe}"
        comments["model.model_config.pet_config.lora_rank"] = of_recipe
    if "num_nextn_predict_layers" in folder.model_config:
        comments["model.model_config.num_nextn_predict_layers"] = "what predicts further tokens is not trained"
    return comments


# Defaults without a recipe, as in the YAMLs of configs/.
_ADAPTER = {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05}
_LEARNING_RATE = 1e-4
# For rewards: the policy must not move faster than its answers are sampled.
_RATE_OF_REWARDS = 2e-5
_PROMPTS, _GENERATIONS = 8, 8
_TRAIN_STEP = {"type": "LoraTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True, "max_grad_norm": 1.0}


@dataclasses.dataclass(frozen=True)
class Draft:
    """The YAML of a run.

    Attributes:
        content (dict): Its nodes.
        parameters, trained (int): Elements of all parameters, and of those that are trained.
        steps (int): Steps of the run, or None without data.
        notes (tuple of str): Further notes for the user.
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
    notes = (*_notes_on_decoding(folder, content), *notes_on(folder, request))
    return Draft(content, parameters, trained, batch.steps, notes, commands_of(folder, request), text)


def _content(folder: ModelFolder, request: Request, batch: Batch) -> Dict[str, Any]:
    length = row_length(folder, request.rows) if request.rows else request.seq_length
    nodes = model_nodes(folder, request.device, seq_length_of(folder, length))
    preference = {"preference": {"loss": request.rows.loss}} if request.rows and request.rows.loss else {}
    fields, rate = _recipe(request.recipe)
    nodes["model"]["model_config"]["pet_config"] = {
        "pet_type": "lora",
        **fields,
        "target_modules": "all-linear",
        "param_init_type": "float32",
        "base_model_name_or_path": folder.path,
    }
    content = {
        "seed": 42,
        "output_dir": "./output",
        "run_mode": "finetune",
        "load_checkpoint": folder.path,
        "load_ckpt_format": "safetensors",
        "auto_trans_ckpt": False,
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": folder.name},
        **_optimization(request, batch, rate),
        **_data(request),
        **_parallel(request),
        "callbacks": _callbacks(request, batch),
        **nodes,
        "runner_wrapper": {**_TRAIN_STEP, **preference},
    }
    if request.prompts:
        _learn_from_rewards(content, request)
    run = YamlRun(content)
    if run.on_cpu and folder.stored != "float32" and not why_not_held(run):
        content["model"]["model_config"][dtype_key(run)] = folder.stored
    return content


def _learn_from_rewards(content: Dict[str, Any], request: Request) -> None:
    """Turns the YAML of a run on data into that of a run on prompts, in place."""
    for node in ("train_dataset", "train_dataset_task"):
        del content[node]
    content["runner_config"].update(batch_size=8, gradient_accumulation_steps=1, sink_mode=False)
    content["runner_config"].pop("sink_size", None)
    content["lr_schedule"] = {
        "type": "ConstantWarmUpLR", "learning_rate": _RATE_OF_REWARDS, "warmup_ratio": 0.0, "total_steps": -1
    }  # fmt: skip
    # Sampler and trainer must be the same policy.
    content["model"]["model_config"]["pet_config"]["lora_dropout"] = 0.0
    content["callbacks"][-1]["save_steps"] = 20
    judges: Dict[str, Any] = {"reward_funcs": list(request.rewards)} if request.rewards else {}
    if request.teacher:
        judges["teacher"] = request.teacher
    content["runner_wrapper"]["rl"] = {
        "prompts": request.prompts,
        **judges,
        "prompts_per_step": _PROMPTS,
        "num_generations": _GENERATIONS,
        "max_completion_length": min(256, content["model"]["model_config"]["seq_length"] // 2),
        "beta": 0.0,
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
    """Returns a recipe's settings of the adapter, and its learning rate; raises ConfigError if it is unknown."""
    if name is None:
        return _ADAPTER, _LEARNING_RATE
    return preset_fields(name), float(PRESETS[name]["learning_rate"])


def _parallel(request: Request) -> Dict[str, Any]:
    if request.devices == 1:
        return {"use_parallel": False}
    return {
        "use_parallel": True,
        "parallel": {
            "parallel_mode": 0,
            "full_batch": False,
            "gradients_mean": False,
            "enable_parallel_optimizer": False,
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
