"""Do the files that a YAML names exist, and are they of the right form: base, adapter, data, tokenizer."""

import dataclasses
import os
from typing import Any, Iterator, List, Mapping, Optional, Tuple

from mindlora.core.errors import CheckpointError, ConfigError
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.git_lfs import refuse_pointer
from mindlora.core.yaml_file import PET, TRAINING_MODES, value_at
from mindlora.files.base import quantize
from mindlora.run.checks.finding import Finding, error, note
from mindlora.run.checks.pet_config import quantizes_base

_TOKENIZER_FILES = ("vocab_file", "tokenizer_file", "merges_file")
# Keys that name a file or a folder which MindFormers reads, wherever a run trains, evaluates or predicts.
_READ = (
    *("src_strategy_path_or_dir", "parallel.strategy_ckpt_load_file", "parallel.strategy_ckpt_config.load_file"),
    *("context.ascend_config.parallel_speed_up_json_path", f"{PET}.adapter_path"),
)
# Below train_dataset and eval_dataset, the keys that name what MindFormers' loaders read; some may name a data set of a
# hub instead.
_READ_BY_LOADERS = (
    *(f"tokenizer.{name}" for name in _TOKENIZER_FILES),
    *("data_loader.annotation_file", "data_loader.dataset_files", "data_loader.data_files"),
    *("data_loader.dataset_path", "data_loader.path"),
)
_DATA_ENDINGS = (".json", ".jsonl", ".txt", ".csv", ".tsv", ".parquet", ".arrow")


def base_of(config: Mapping[str, Any]) -> Tuple[str, Optional[str]]:
    """Returns the key that names the base, and its path: the one from which MindFormers' Trainer takes the weights.

    MindFormers 1.9 prefers checkpoint.load_path, and takes pretrained_model_dir where nothing else is named and that
    folder has weights.
    """
    folder = config.get("pretrained_model_dir")
    if value_at(config, "checkpoint.load_path"):
        return "checkpoint.load_path", value_at(config, "checkpoint.load_path")
    if config.get("load_checkpoint") or not folder:
        return "load_checkpoint", config.get("load_checkpoint")
    has_weights = os.path.isdir(folder) and any(name.endswith(".safetensors") for name in os.listdir(folder))
    return ("pretrained_model_dir", folder) if has_weights or not os.path.isdir(folder) else ("load_checkpoint", None)


def check_files(config: Mapping[str, Any], complete: bool = False) -> Iterator[Finding]:
    """Yields a finding for each file that the run will read and that is missing, not named or of the wrong form.

    ``complete`` says that the command line is in ``config``, so that a file which nothing names is missing.
    """
    yield from _check_base(config, complete)
    training = config.get("run_mode") in TRAINING_MODES
    evaluating = config.get("run_mode") == "eval" or bool(config.get("do_eval"))
    if training:
        yield from _check_data(config, "train", complete)
    if evaluating:
        yield from _check_data(config, "eval", complete)
    for key in (*_READ, *(("pretrained_model_dir",) if base_of(config)[0] != "pretrained_model_dir" else ())):
        yield from check_path(config, key)
    if isinstance(value_at(config, "context.affinity_config"), str):
        yield from check_path(config, "context.affinity_config")
    for name in _TOKENIZER_FILES:
        for finding in check_path(config, f"processor.tokenizer.{name}"):
            # Training alone does not read it, but what comes after it will.
            yield finding if evaluating or not training else dataclasses.replace(finding, severity="warning")


def _check_base(config: Mapping[str, Any], complete: bool) -> Iterator[Finding]:
    key, path = base_of(config)
    if not path:
        if complete and config.get("auto_trans_ckpt"):
            yield error(
                "auto_trans_ckpt",
                "auto_trans_ckpt is True, and there is no checkpoint to transform: load_checkpoint is empty.",
                "Pass --load_checkpoint, or --auto_trans_ckpt False.",
            )
        if value_at(config, PET) and not config.get("pretrained_model_dir"):
            fault = "No path is set: the base under the adapter has random weights."
            yield Finding("warning" if complete else "note", key, fault, f"Set it, or pass --{key}.")
        return
    missing = list(check_path(config, key, f"--{key}"))
    yield from missing or _check_form(config, path)


def _check_form(config: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Yields what is wrong with a base that exists: it is not a checkpoint, or not in the form that the run reads."""
    try:
        refuse_pointer(path, ConfigError)
    except ConfigError as pointer:
        yield error("load_checkpoint", str(pointer))
        return
    endings = {os.path.splitext(path)[1]}
    for _, _, names in os.walk(path):
        endings |= {os.path.splitext(name)[1] for name in names}
    formats = [form for form in ("ckpt", "safetensors") if f".{form}" in endings]
    if not formats:
        holds = "a folder without one" if os.path.isdir(path) else "not one"
        yield error(
            "load_checkpoint",
            f"load_checkpoint must be a .ckpt or .safetensors file, or a folder of them, and {path} is {holds} "
            "(--load_checkpoint).",
        )
        return
    # MindFormers reads its newer format from .safetensors files alone; a quantized base has no other.
    newer = config.get("checkpoint") or config.get("use_legacy_format") is False
    quantized = quantizes_base(config)
    read = "safetensors" if newer or quantized else config.get("load_ckpt_format") or "ckpt"
    if read not in formats and not quantized:
        yield error(
            "load_checkpoint",
            f"load_checkpoint: {path} is {' and '.join(formats)}, and load_ckpt_format is {read!r}.",
            f"Set load_ckpt_format: {' or '.join(formats)} (--load_ckpt_format).",
        )


def check_quantized_base(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error unless load_checkpoint is quantized if and only if quantize_base is set."""
    path = base_of(config)[1]
    if not path or not os.path.exists(path):
        return
    is_safetensors = path.endswith(".safetensors") and os.path.isfile(path)
    if quantizes_base(config) and not is_safetensors:
        yield error(
            "load_checkpoint",
            f"load_checkpoint: {path} is not a .safetensors file, but pet_config has quantize_base.",
            f"Write a quantized base once: mindlora base quantize {path} base-nf4.safetensors",
        )
    elif quantizes_base(config):
        try:
            quantize.check_quantized_base(path, value_at(config, f"{PET}.quantize_exclude"))
        except CheckpointError as refusal:
            yield error("load_checkpoint", str(refusal))
    elif is_safetensors:
        with TensorFile(path) as file:
            quantized = quantize.quantized_paths(file.tensors)
        if quantized:
            yield error(
                "load_checkpoint",
                f"load_checkpoint: {path} is quantized, but pet_config has no quantize_base.",
                "Set quantize_base: nf4, or name a base that is not quantized.",
            )


def _check_data(config: Mapping[str, Any], kind: str, complete: bool) -> Iterator[Finding]:
    key = f"{kind}_dataset.data_loader"
    loader = value_at(config, key)
    if not loader:
        yield error(key, "The node is missing, so the run has no data.", "Name the data in it.")
        return
    for name in _READ_BY_LOADERS:
        unread = name.startswith("tokenizer.") and loader.get("type") == "MindDataset"
        if not unread and _names_files(value_at(config, f"{kind}_dataset.{name}")):
            yield from check_path(config, f"{kind}_dataset.{name}")
    if loader.get("type") == "BlendedMegatronDatasetDataLoader":
        yield from _check_prefixes(config, f"{key}.config.data_path")
    if loader.get("type") != "MindDataset":
        if _names_files(loader.get("dataset_dir")):
            yield from check_path(config, f"{key}.dataset_dir", f"--{kind}_dataset_dir")
        return
    if loader.get("dataset_files"):
        return
    key = f"{key}.dataset_dir"
    path = loader.get("dataset_dir")
    flag = f"--{kind}_dataset_dir"
    if not path and complete:
        yield error(key, f"{key} is empty.", f"Name a MindRecord, or a folder of them, with {flag}.")
        return
    missing = list(check_path(config, key, flag, "the run has no data"))
    yield from missing
    if not missing and not mindrecord_files(path):
        yield error(
            key, f"{key}: {path} has no file in it that ends in .mindrecord.", f"Correct the path, or pass {flag}."
        )


def _check_prefixes(config: Mapping[str, Any], key: str) -> Iterator[Finding]:
    """Yields an error for each prefix of Megatron's files, without .bin and .idx, that names none."""
    paths = value_at(config, key)
    # A list has weights between the prefixes.
    for prefix in paths if isinstance(paths, list) else [paths]:
        if isinstance(prefix, str) and not _is_number(prefix) and not os.path.isfile(f"{prefix}.idx"):
            yield error(
                key,
                f"{prefix}.idx does not exist (the current folder is {os.getcwd()}).",
                "Name Megatron's files without their ending.",
            )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _names_files(value: Any) -> bool:
    """Returns whether a value names files, and no data set of a hub, no address and no pattern of names."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or "*" in name or "://" in name:
            return False
        if not name.startswith((".", "/")) and not name.endswith((*_DATA_ENDINGS, ".mindrecord", ".model")):
            return False
    return True


def check_path(config: Mapping[str, Any], key: str, flag: str = "", effect: str = "") -> List[Finding]:
    """Returns a finding if the path at ``key`` does not exist, or if it is empty and that has an ``effect``."""
    path = value_at(config, key)
    if not path:
        return [note(key, f"No path is set: {effect}.", f"Set it, or pass {flag}.")] if effect else []
    paths = path if isinstance(path, list) else [path]
    if not all(isinstance(each, str) for each in paths):
        return [error(key, f"The value is {path!r}, which is not a path.", "Write a path.")]
    missing = [each for each in paths if not os.path.exists(each)]
    if not missing:
        return []
    advice = f"Correct the path{f', or pass {flag}' if flag else ', or remove the key'}."
    return [error(key, f"{missing[0]} does not exist (the current folder is {os.getcwd()}).", advice)]
