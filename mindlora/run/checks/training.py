"""What the train step and the callbacks of a run need from the rest of its YAML."""

from typing import Any, Iterator, List, Mapping, Optional

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT
from mindlora.core.text import shown, suggestion
from mindlora.core.yaml_file import PET, TRAINING_MODES, value_at
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.key_ranges import named_items, setting
from mindlora.training.exchange.settings import exchange_settings
from mindlora.training.preference.settings import MEASURES

WRAPPER = "LoraTrainOneStepCell"
# The steps of MindFormers. A step of the user's own may be made from mindlora's; callbacks look at it when they begin.
_STEPS_OF_MINDFORMERS = ("MFTrainOneStepCell", "MFPipelineWithLossScaleCell")
DATA_PARALLEL = (0, "DATA_PARALLEL", "data_parallel")
# Alone and in data parallel, MindFormers sets gradient_accumulation_steps to 1; in the other modes it accumulates.
_ALONE = (*DATA_PARALLEL, "STAND_ALONE", "stand_alone")
# Callbacks that set the rate, the limits or the weights of a step.
CONTROLLING = ("TrainingGuard", "GradientNormRate", "ReduceOnPlateau", "WarmUp", "ForgettingBudget")
EXCHANGE = "runner_wrapper.gradient_exchange"
# Where one of these is above 1, no rank holds the whole adapter.
_SPLITS = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
_METRICS = ["held_out_loss", "loss"]
# What HeldOutLoss measures beside the loss where a run trains a classifier, and where it learns from preferences.
_OF_LABELS = ["held_out_accuracy", "held_out_f1"]
_OF_PREFERENCES = [f"held_out_{name}" for name in MEASURES]


def train_step(config: Mapping[str, Any]) -> Optional[str]:
    """Returns the class of the train step."""
    return value_at(config, "runner_wrapper.type") or "MFTrainOneStepCell"


def accumulates_here(config: Mapping[str, Any]) -> bool:
    """Returns whether a run is alone or data parallel, where mindlora's train step accumulates gradients."""
    return not config.get("use_parallel") or setting(config, "parallel.parallel_mode") in _ALONE


def split_by(config: Mapping[str, Any]) -> Optional[str]:
    """Returns in words what keeps each rank of a parallel run from holding the whole adapter, or None."""
    for key in _SPLITS:
        parts = setting(config, f"parallel_config.{key}")
        if parts > 1:
            return f"parallel_config.{key} is {parts}"
    if value_at(config, "parallel.enable_parallel_optimizer"):
        return "parallel.enable_parallel_optimizer is True"
    mode = setting(config, "parallel.parallel_mode")
    return None if mode in DATA_PARALLEL else f"parallel.parallel_mode is {mode!r}"


def callbacks_of(config: Mapping[str, Any], kind: str) -> Iterator[tuple]:
    """Yields (where it is in the YAML, the node) of each callback of one type."""
    for name, callback in named_items(config.get("callbacks")):
        if callback.get("type") == kind:
            yield f"callbacks.{name}", callback


def check_training(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each setting of a training run that another one makes impossible; nothing for other runs."""
    if config.get("run_mode") not in TRAINING_MODES:
        return
    yield from _check_accumulation(config)
    yield from _check_exchange(config)
    yield from _check_controlled(config)
    if value_at(config, f"{PET}.loraplus_lr_ratio") is not None and config.get("grouped_lr_schedule"):
        yield error(
            f"{PET}.loraplus_lr_ratio",
            "The YAML has both pet_config.loraplus_lr_ratio and grouped_lr_schedule.",
            "Keep one of them.",
        )
    yield from _check_saving(config)
    yield from _check_metrics(config)


def _check_accumulation(config: Mapping[str, Any]) -> Iterator[Finding]:
    key = "runner_config.gradient_accumulation_steps"
    steps = setting(config, key)
    if steps == 1 or not accumulates_here(config):
        return
    if train_step(config) != WRAPPER:
        yield error(
            key,
            f"{key} is {steps}, and runner_wrapper.type is {train_step(config)}, which accumulates nothing alone and "
            "in data parallel.",
            f"Set runner_wrapper.type: {WRAPPER}.",
        )
    if value_at(config, "runner_wrapper.micro_batches"):
        yield error(key, f"The YAML has both {key} and runner_wrapper.micro_batches.", "Keep the first.")
    if not value_at(config, "train_dataset.drop_remainder"):
        yield error(
            key,
            f"{key} is {steps}, and train_dataset.drop_remainder is not True: the last batch of the data could not be "
            "split into micro-batches.",
            "Set it to True.",
        )


def _check_exchange(config: Mapping[str, Any]) -> Iterator[Finding]:
    exchange = value_at(config, EXCHANGE)
    if exchange is None:
        return
    try:
        kind = exchange_settings(exchange).type
    except ConfigError as refusal:
        yield error(EXCHANGE, str(refusal))
        return
    split = split_by(config) if config.get("use_parallel") else None
    if train_step(config) != WRAPPER:
        yield error(
            EXCHANGE,
            f"gradient_exchange is an argument of {WRAPPER}, and runner_wrapper.type is {train_step(config)!r}.",
            f"Set it to {WRAPPER}, or remove gradient_exchange.",
        )
    elif split and kind != "dense":
        yield error(
            EXCHANGE,
            f"gradient_exchange is {kind}, and {split}: gradients are compressed only between ranks that each hold the "
            "whole adapter (parallel_mode 0).",
            "Use dense, or data parallelism alone.",
        )


def _check_controlled(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each callback that steers the train step where MindFormers' own step runs."""
    if train_step(config) not in _STEPS_OF_MINDFORMERS and accumulates_here(config):
        return
    for kind in CONTROLLING:
        for where, _ in callbacks_of(config, kind):
            yield error(
                where,
                f"{where} needs mindlora's train step, alone or in data parallel.",
                f"Set runner_wrapper.type: {WRAPPER} and parallel.parallel_mode: 0, or remove it.",
            )


def _check_saving(config: Mapping[str, Any]) -> Iterator[Finding]:
    saving = list(callbacks_of(config, "LoraCheckpoint"))
    if saving and config.get("resume_training") and not list(callbacks_of(config, "CheckpointMonitor")):
        yield error(
            "resume_training",
            f"resume_training is {config['resume_training']}, which resumes from complete checkpoints of "
            "CheckpointMonitor, and this run saves with LoraCheckpoint.",
            "Use --resume, and set resume_training: False.",
        )
    for where, _ in saving:
        if not value_at(config, PET):
            yield error(
                where,
                f"{where} saves adapters, and model_config has no pet_config.",
                "Add pet_config, or save with CheckpointMonitor.",
            )


def _check_metrics(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields what keeps LoraCheckpoint from choosing the best adapter."""
    for where, callback in list(callbacks_of(config, "HeldOutLoss"))[1:]:
        yield error(
            where,
            f"{where}: callbacks has another HeldOutLoss before the one of {shown(callback.get('dataset_dir'))}, and "
            "both report the same metrics.",
            "Remove one.",
        )
    # Evaluation and callbacks of the user's own may report metrics of their own.
    others = config.get("do_eval") or any(callback.get("auto_register") for callback in config.get("callbacks") or [])
    held_out = ["held_out_loss", *(_OF_PREFERENCES if value_at(config, "runner_wrapper.preference") else ())]
    held_out += _OF_LABELS if value_at(config, "model.model_config.num_labels") else ()
    for where, callback in callbacks_of(config, "LoraCheckpoint"):
        metric = callback.get("best_metric", "loss")
        if metric in held_out:
            yield from _check_held_out(config, where, callback)
        elif metric not in _METRICS and not others:
            hint = suggestion(str(metric), [*_METRICS, *held_out[1:]])
            yield error(where, f"{where}: best_metric is {metric!r}, which nothing reports.{hint}")


def _check_held_out(config: Mapping[str, Any], where: str, callback: Mapping[str, Any]) -> Iterator[Finding]:
    measuring: List[Mapping[str, Any]] = [node for _, node in callbacks_of(config, "HeldOutLoss")]
    if not measuring:
        yield error(
            where,
            f"{where}: best_metric is {callback['best_metric']}, and callbacks has no HeldOutLoss, which measures it.",
            "Add it.",
        )
        return
    saved = callback.get("save_steps", 100)
    measured = measuring[0].get("every_steps", 100)
    if saved in COUNT and measured in COUNT and saved % measured:
        yield error(
            where,
            f"{where}: save_steps is {saved}, and HeldOutLoss measures every {measured} steps, so at "
            "some saves there is no held_out_loss.",
            f"Set save_steps to a multiple of every_steps, such as {measured}.",
        )
