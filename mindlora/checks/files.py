"""Checks that the files that a YAML names exist: base, data, adapter, tokenizer."""

import os
from typing import Iterator, Optional

from mindlora.checks.finding import Finding
from mindlora.common.run_modes import TRAINING_MODES
from mindlora.common.yaml_file import PET, value_at
from mindlora.config import LoraConfig

# MindFormers takes the weights from the first of these that is set.
_BASES = ("checkpoint.load_path", "load_checkpoint", "pretrained_model_dir")
_TOKENIZER_FILES = ("vocab_file", "tokenizer_file", "merges_file")


def check_files(config: dict, lora: Optional[LoraConfig]) -> Iterator[Finding]:
    """Yields a finding for each file that this run will read and that is missing or not named."""
    effect = "the base under the adapter has random weights" if lora else ""
    base = next((key for key in _BASES if value_at(config, key)), "load_checkpoint")
    yield from _check_path(config, base, f"--{base}", effect)
    if config.get("run_mode") in TRAINING_MODES:
        yield from _check_data(config, "train")
    if config.get("run_mode") == "eval" or config.get("do_eval"):
        yield from _check_data(config, "eval")
    yield from _check_path(config, f"{PET}.adapter_path")
    for name in _TOKENIZER_FILES:
        yield from _check_path(config, f"processor.tokenizer.{name}")


def _check_data(config, kind) -> Iterator[Finding]:
    key = f"{kind}_dataset.data_loader"
    loader = value_at(config, key)
    if not loader:
        yield Finding("error", key, "The node is missing, so the run has no data.", "Name the data in it.")
    elif value_at(config, f"{key}.type") == "MindDataset" and not value_at(config, f"{key}.dataset_files"):
        yield from _check_path(config, f"{key}.dataset_dir", f"--{kind}_dataset_dir", "the run has no data")


def _check_path(config, key, flag="", effect="") -> Iterator[Finding]:
    """Yields a finding if the path at ``key`` does not exist, or if it is empty and that has an ``effect``."""
    path = value_at(config, key)
    if not path:
        if effect:
            yield Finding("note", key, f"No path is set: {effect}.", f"Set it, or pass {flag}.")
    elif not isinstance(path, str):
        yield Finding("error", key, f"The value is {path!r}, which is not a path.", "Write a path.")
    elif not os.path.exists(path):
        advice = f"Correct the path{f', or pass {flag}' if flag else ''}."
        yield Finding("error", key, f"{path} does not exist (the current folder is {os.getcwd()}).", advice)
