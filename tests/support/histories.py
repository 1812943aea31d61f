"""Made-up histories of training runs, for the tests of the report."""

import math

from mindlora.training.report.history import HistoryWriter

CONFIGURATION = {
    "seed": 42,
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "weight_decay": 0.0},
    "callbacks": [{"type": "MFLossMonitor"}, {"type": "LoraCheckpoint", "save_steps": 100}],
    "model": {"model_config": {"hidden_size": 128, "pet_config": {"lora_rank": 16, "target_modules": "all-linear"}}},
}
DEFAULTS = {
    "optimizer.weight_decay": 0,
    "optimizer.betas": [0.9, 0.999],
    "callbacks.LoraCheckpoint.save_steps": 100,
    "model.model_config.pet_config.lora_rank": 8,
}
NAMES = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.w1", "feed_forward.w2")

EVALUATION = {
    "tables": [{"title": "accuracy of q.jsonl (9 examples)", "rows": [["model", "value"], ["tuned", "0.75"]]}],
    "verdicts": ["tuned against the base: better."],
}


def write_history(directory, steps=200, speed=1.0, nan_at=(), layers=4, **configuration):
    """Writes the history of a run of ``steps`` steps that learns at ``speed``: all kinds of records.

    Args:
        directory (Path): The folder.
        steps (int): Training steps.
        speed (float): How fast the loss falls.
        nan_at (sequence of int): Steps at which loss and norm are NaN and the step is skipped.
        layers (int): Layers of the network.
        **configuration: Nodes that replace those of CONFIGURATION.
    """
    writer = HistoryWriter(str(directory), 0)
    writer.append(0, run=description(steps, **configuration))
    writer.append(0, answers=[{"prompt": "Who are you?", "answer": "the the the"}])
    for step in range(1, steps + 1):
        writer.append(step, **step_record(step, steps, speed, math.nan if step in nan_at else 0.0))
        if step in nan_at:
            writer.append(step, event="guard", message="The loss is NaN: the step is skipped.")
        if step % max(1, steps // 8) == 0:
            writer.append(step, forgetting=0.02 * speed * step / steps)
            writer.append(step, held_out_loss=1.2 + 3 * math.exp(-3 * speed * step / steps))
    writer.append(steps, health=health(steps, layers))
    writer.append(steps, answers=[{"prompt": "Who are you?", "answer": "A tiny Llama."}])
    writer.append(steps, evaluation=EVALUATION)
    writer.close()


def description(steps, **configuration):
    """Returns the record "run"."""
    return {
        "time": 1e9,
        "total_steps": steps,
        "configuration": {**CONFIGURATION, **configuration},
        "defaults": DEFAULTS,
        "versions": {"mindlora": "0.2", "MindSpore": "2.9.0"},
        "machine": {"device": "CPU", "cores": 2},
        "data": {"rows": 432, "tokens in a row": 65},
    }


def step_record(step, steps, speed=1.0, extra=0.0):
    """Returns the fields of one training step."""
    noise = math.sin(step * 12.9898) * 0.5
    return {
        "time": 1e9 + 2.5 * step,
        "loss": 1 + 3 * math.exp(-3 * speed * step / steps) + 0.3 * noise + extra,
        "learning_rate": 1e-4 * min(1, step / (0.05 * steps + 1)) * (1 + math.cos(math.pi * step / steps)) / 2,
        "gradient_norm": math.exp(noise * 2) + extra,
        "tokens": 4096,
        "tokens_per_second": 1638 + 60 * noise if step > 1 else 210.0,
        "bytes_exchanged": 598_016,
        "memory_bytes": int(2.1e9 + 1e8 * min(1, step / 50)),
        "skipped": extra != 0,
    }


def health(step, layers):
    """Returns HealthReport.to_json() of a network with NAMES in each layer."""
    cells = {}
    for layer in range(layers):
        for number, name in enumerate(NAMES):
            value = 1e-3 * (1 + number) * (1 + layer / layers)
            part = {"size": 2048, "norm": 1.0, "zeros": 0.0, "gradient_norm": 10 * value, "update": value / 10}
            cells[f"model.layers.{layer}.{name}"] = {
                "rank": 16,
                "zero_part": "B",
                "parts": {"A": part, "B": {**part, "gradient_norm": None}},
                "effective_rank": 4.0 + number,
                "change_norm": value,
                "change": None if (layer, number) == (1, 2) else value,
            }
    finding = {
        "rule": "rank_unused",
        "path": "model.layers.0.attention.wq",
        "message": "The change uses 4 of 16 ranks.",
        "advice": "Lower lora_rank.",
    }
    return {"step": step, "cells": cells, "findings": [finding]}
