"""Checks the needs of the train step, the callbacks and the memory-saving options in the rest of a YAML."""

from typing import Any, Iterator, Mapping

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT
from mindlora.core.text import shown, suggestion
from mindlora.core.yaml_file import PET
from mindlora.run.checks.finding import Finding, error, note, warning
from mindlora.run.yaml_run import WRAPPER, YamlRun
from mindlora.training.exchange.settings import exchange_settings
from mindlora.training.preference.settings import MEASURES
from mindlora.training.rl.settings import METRICS

# MindFormers' train steps. A user's own step may be derived from mindlora's; callbacks check it when they begin.
_STEPS_OF_MINDFORMERS = ("MFTrainOneStepCell", "MFPipelineWithLossScaleCell")
# Callbacks that set the rate, the limits or the weights of a step.
CONTROLLING = ("TrainingGuard", "GradientNormRate", "ReduceOnPlateau", "WarmUp", "ForgettingBudget")
EXCHANGE = "runner_wrapper.gradient_exchange"
_METRICS = ["held_out_loss", "loss"]
# HeldOutLoss' measures beside the loss for classifiers, and for preferences.
_OF_LABELS = ["held_out_accuracy", "held_out_f1"]
_OF_PREFERENCES = [f"held_out_{name}" for name in MEASURES]
_RECOMPUTE = "recompute_config"
_SWAP = "swap_config"
# Keys of recomputation, with the value that switches each off.
_HOW = {"parallel_optimizer_comm_recompute": False, "recompute_slice_activation": False, "mp_comm_recompute": True}


def check_training(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting of a training run that another one rules out; nothing for other runs."""
    if not run.trains:
        return
    yield from _check_accumulation(run)
    yield from _check_exchange(run)
    yield from _check_controlled(run)
    if run.pet_config.get("loraplus_lr_ratio") is not None and run.at("grouped_lr_schedule"):
        yield error(
            f"{PET}.loraplus_lr_ratio",
            "The YAML has both pet_config.loraplus_lr_ratio and grouped_lr_schedule.",
            "Keep one of them.",
        )
    yield from _check_saving(run)
    yield from _check_metrics(run)


def _check_accumulation(run: YamlRun) -> Iterator[Finding]:
    key = "runner_config.gradient_accumulation_steps"
    steps = run.accumulation
    if steps == 1 or not run.accumulates_here:
        return
    if run.train_step != WRAPPER:
        yield error(
            key,
            f"{key} is {steps}, but runner_wrapper.type is {run.train_step}, which accumulates nothing alone and "
            "in data parallel.",
            f"Set runner_wrapper.type: {WRAPPER}.",
        )
    if run.at("runner_wrapper.micro_batches"):
        yield error(key, f"The YAML has both {key} and runner_wrapper.micro_batches.", "Keep the first.")
    if not run.at("train_dataset.drop_remainder"):
        yield error(
            key,
            f"{key} is {steps}, but train_dataset.drop_remainder is not True: the last batch of the data could not be "
            "split into micro-batches.",
            "Set it to True.",
        )


def _check_exchange(run: YamlRun) -> Iterator[Finding]:
    exchange = run.at(EXCHANGE)
    if exchange is None:
        return
    try:
        kind = exchange_settings(exchange).type
    except ConfigError as refusal:
        yield error(EXCHANGE, str(refusal))
        return
    split = run.split_by if run.in_parallel else None
    if run.train_step != WRAPPER:
        yield error(
            EXCHANGE,
            f"gradient_exchange is an argument of {WRAPPER}, but runner_wrapper.type is {run.train_step!r}.",
            f"Set it to {WRAPPER}, or remove gradient_exchange.",
        )
    elif split and kind != "dense":
        yield error(
            EXCHANGE,
            f"gradient_exchange is {kind}, but {split}: gradients are compressed only between ranks that each hold the "
            "whole adapter (parallel_mode 0).",
            "Use dense, or data parallelism alone.",
        )


def _check_controlled(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each callback that controls the train step if MindFormers' own step runs."""
    if run.train_step not in _STEPS_OF_MINDFORMERS and run.accumulates_here:
        return
    for kind in CONTROLLING:
        for where, _ in run.callbacks_of(kind):
            yield error(
                where,
                f"{where} needs mindlora's train step, alone or in data parallel.",
                f"Set runner_wrapper.type: {WRAPPER} and parallel.parallel_mode: 0, or remove it.",
            )


def _check_saving(run: YamlRun) -> Iterator[Finding]:
    saving = run.callbacks_of("LoraCheckpoint")
    if saving and run.at("resume_training") and not run.callbacks_of("CheckpointMonitor"):
        yield error(
            "resume_training",
            f"resume_training is {run.at('resume_training')}, which resumes from complete checkpoints of "
            "CheckpointMonitor, and this run saves with LoraCheckpoint.",
            "Use --resume, and set resume_training: False.",
        )
    for where, _ in saving:
        if not run.pet_config:
            yield error(
                where,
                f"{where} saves adapters, but model_config has no pet_config.",
                "Add pet_config, or save with CheckpointMonitor.",
            )


def _check_metrics(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting that keeps LoraCheckpoint from choosing the best adapter."""
    for where, callback in run.callbacks_of("HeldOutLoss")[1:]:
        yield error(
            where,
            f"{where}: callbacks has another HeldOutLoss before the one of {shown(callback.get('dataset_dir'))}, and "
            "both report the same metrics.",
            "Remove one.",
        )
    # Evaluation and users' own callbacks may report their own metrics.
    others = run.at("do_eval") or any(callback.get("auto_register") for _, callback in run.callbacks)
    held_out = ["held_out_loss", *(_OF_PREFERENCES if run.preference else ())]
    held_out += _OF_LABELS if run.model_config.get("num_labels") else ()
    reported = [*_METRICS, *(METRICS if run.rl is not None else ())]
    for where, callback in run.callbacks_of("LoraCheckpoint"):
        metric = callback.get("best_metric", "loss")
        if metric in held_out:
            yield from _check_held_out(run, where, callback)
        elif metric not in reported and not others:
            hint = suggestion(str(metric), [*reported, *held_out[1:]])
            yield error(where, f"{where}: best_metric is {metric!r}, which nothing reports.{hint}")


def _check_held_out(run: YamlRun, where: str, callback: Mapping[str, Any]) -> Iterator[Finding]:
    measuring = [node for _, node in run.callbacks_of("HeldOutLoss")]
    if not measuring:
        yield error(
            where,
            f"{where}: best_metric is {callback['best_metric']}, but callbacks has no HeldOutLoss, which measures it.",
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


def check_memory_options(run: YamlRun) -> Iterator[Finding]:
    """Yields a finding for each option of recomputation, swapping or offloading without its stated effect.

    There are none for a run that does not train.
    """
    if run.trains:
        yield from _check_recomputation(run)
        yield from _check_swapping(run)
        yield from _check_optimizer(run)


def _check_recomputation(run: YamlRun) -> Iterator[Finding]:
    recomputes = bool(run.at(f"{_RECOMPUTE}.recompute"))
    for key, off in _HOW.items():
        value = run.at(f"{_RECOMPUTE}.{key}")
        if value is None or value == off:
            continue
        if not recomputes:
            yield warning(
                f"{_RECOMPUTE}.{key}",
                f"{key} has no effect without recompute.",
                f"Set recompute: True, or remove {key}.",
            )
        elif not run.is_sharded:
            yield note(
                f"{_RECOMPUTE}.{key}",
                f"{key} has an effect only with use_parallel: True and parallel.parallel_mode 1 or 2.",
            )


def _check_swapping(run: YamlRun) -> Iterator[Finding]:
    key = f"{_SWAP}.swap"
    node = run.at(_SWAP) or {}
    named = [name for name in ("layer_swap", "op_swap") if node.get(name)]
    if not node.get("swap"):
        if named:
            yield warning(key, f"swap is off, so {' and '.join(named)} have no effect.", "Set swap: True.")
    elif not named:
        yield warning(key, "swap is on, but neither layer_swap nor op_swap says what to swap.")
    elif run.on_cpu:
        yield warning(key, "swap moves activations from an NPU to the host: it has no effect on a CPU.")
    elif run.at(f"{_RECOMPUTE}.recompute") is True:
        yield warning(
            key,
            "swap has no effect on layers that are recomputed, but recompute is True for all of them.",
            "Give recompute a list of the other layers.",
        )


def _check_optimizer(run: YamlRun) -> Iterator[Finding]:
    if not run.at("optimizer.swap"):
        return
    if run.on_cpu:
        fault = "optimizer.swap keeps the optimizer's state on the host: it has no effect on a CPU."
    else:
        fault = (
            "optimizer.swap moves the optimizer's state to the host. With LoRA that is eight bytes for each element of "
            "A and B, so it saves little and slows each step."
        )
    yield note("optimizer.swap", fault)
