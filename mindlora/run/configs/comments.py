"""What the YAML of a run tells its reader: what it is, the commands that use it, what to change."""

import shlex
from typing import Dict, List, Tuple

from mindlora.run.configs.folder import ModelFolder
from mindlora.run.configs.model import CPU, seq_length_of
from mindlora.run.configs.request import Batch, Request, loads_folder

_COMMENTS = {
    "runner_config.epochs": "how often the data is read",
    "lr_schedule.learning_rate": "of all settings the one to try first; full fine-tuning takes about a tenth",
    "lr_schedule.total_steps": "computed from the data and epochs",
    "optimizer.weight_decay": "an adapter is small: none is needed",
    "model.model_config.pet_config.target_modules": "better than attention alone (Schulman et al., 2025)",
    "model.model_config.pet_config.lora_rank": "more for more data",
    "model.model_config.pet_config.param_init_type": "the optimizer changes A and B in small steps",
    "parallel.gradients_mean": "the loss is already the mean over the rows of all NPUs",
    "parallel.parallel_mode": "semi-automatic; with data_parallel alone only the batch is divided",
    "parallel.enable_parallel_optimizer": "the moments of an adapter are too small to be worth dividing",
    "parallel.strategy_ckpt_config.only_trainable_params": "else MindFormers does not load the frozen weights",
    "parallel_config.model_parallel": "above 1, each NPU holds a part of the model (docs/sharding.md)",
    "runner_wrapper.preference.loss": "docs/preferences.md has the others, and beta",
    "context.max_device_memory": "of an NPU with 64 GB",
    "recompute_config.recompute": "False is faster, and takes more memory (mindlora plan)",
    "model.model_config.seq_length": "the rows have one token more",
}


def header_of(folder: ModelFolder, request: Request, batch: Batch, trained: int, parameters: int) -> List[str]:
    """Returns the lines at the beginning; of ``parameters`` elements, ``trained`` are trained."""
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
    """Returns what the user should know of the model and of the data."""
    notes = []
    if folder.unstated_end is not None:
        notes.append(
            f"the chat template ends the assistant's turns with {folder.unstated_end}, and the folder does not say "
            "that the model stops there: eos_token_id of the YAML has it too"
        )
    if request.rows and request.rows.loss:
        notes.append(
            f"{request.rows.path} holds preferences, which the run learns with the loss {request.rows.loss} "
            "(runner_wrapper.preference; docs/preferences.md has the others)"
        )
    return tuple(notes)


def commands_of(folder: ModelFolder, request: Request) -> Tuple[str, ...]:
    """Returns the commands from here to an answer of the adapter."""
    model = shlex.quote(folder.path)
    run = f"mindlora-run --config {shlex.quote(request.output)}"
    if request.devices > 1:
        workers = f"--worker_num={request.devices} --local_worker_num={request.devices}"
        run = f"msrun {workers} --join=True $(which mindlora-run) --config {shlex.quote(request.output)}"
    commands = []
    if request.rows is None:
        length = seq_length_of(folder, request.seq_length)
        rows = "--input rows.jsonl --output rows.mindrecord"
        commands.append(f"mindlora data alpaca {rows} --tokenizer {model} --seq-length {length}")
        run += " --train_dataset_dir rows.mindrecord"
    if not loads_folder(folder, request):
        commands.append(f"mindlora base convert {model} base.safetensors --to mcore")
        run += " --load_checkpoint base.safetensors"
    commands.append(run)
    if folder.architecture.legacy:
        commands.append(f"mindlora generate --model {model} --adapter output/lora_checkpoint/best --prompt 'Hello'")
    return tuple(commands)


def _where(request: Request) -> str:
    if request.device == CPU:
        return "a CPU"
    return "one NPU" if request.devices == 1 else f"{request.devices} NPUs"


def _about_steps(request: Request, batch: Batch) -> List[str]:
    if request.rows is None:
        return [f"a step: {batch.per_step} rows"]
    return [
        f"data: {request.rows.count:,} rows of {request.rows.tokens:,} tokens; a step: {batch.per_step} rows; steps: "
        f"{batch.per_epoch:,} in an epoch, {batch.steps:,} in all"
    ]


def comments_of(folder: ModelFolder, request: Request) -> Dict[str, str]:
    """Returns dotted key -> what is said of it."""
    comments = dict(_COMMENTS)
    rows = "rows at a time; more are faster while the memory suffices"
    comments["runner_config.batch_size"] = rows if request.device == CPU else "rows on each NPU at a time"
    if request.devices == 1:
        comments["runner_config.gradient_accumulation_steps"] = "so many batches make a step"
    if folder.ids.pad == folder.ids.eos:
        comments["model.model_config.pad_token_id"] = "the token that ends a text, with which mindlora data pads"
    if not loads_folder(folder, request):
        comments["load_checkpoint"] = "written by mindlora base convert: on one device MindFormers cannot load a folder"
    if request.recipe:
        of_recipe = f"with alpha, dropout and rate, of the recipe {request.recipe}"
        comments["model.model_config.pet_config.lora_rank"] = of_recipe
    if "num_nextn_predict_layers" in folder.model_config:
        comments["model.model_config.num_nextn_predict_layers"] = "what predicts further tokens is not trained"
    return comments
