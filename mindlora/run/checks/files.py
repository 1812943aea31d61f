"""Checks that the files that a YAML names exist and have the right form: base, adapter, data, tokenizer."""

import dataclasses
import os
from typing import Any, Iterator, List

from mindlora.core.errors import CheckpointError, ConfigError, LoraError
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.git_lfs import refuse_pointer
from mindlora.core.text import examples
from mindlora.core.yaml_file import PET
from mindlora.files.base import quantize
from mindlora.files.base.quantized.stored import HOLD_ADVICE
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.files.base.renaming import with_smaller_groups
from mindlora.run.checks.base_weights import loads_by_tensor
from mindlora.run.checks.finding import Finding, error, note
from mindlora.run.yaml_run import YamlRun

_TOKENIZER_FILES = ("vocab_file", "tokenizer_file", "merges_file")
# Keys that name a file or folder that MindFormers reads in training, evaluation and prediction.
_READ = (
    *("src_strategy_path_or_dir", "parallel.strategy_ckpt_load_file", "parallel.strategy_ckpt_config.load_file"),
    *("context.ascend_config.parallel_speed_up_json_path", f"{PET}.adapter_path"),
)
# Below train_dataset and eval_dataset, the keys of the files that MindFormers' loaders read; some may name a dataset of
# a hub instead.
_READ_BY_LOADERS = (
    *(f"tokenizer.{name}" for name in _TOKENIZER_FILES),
    *("data_loader.annotation_file", "data_loader.dataset_files", "data_loader.data_files"),
    *("data_loader.dataset_path", "data_loader.path"),
)
_DATA_ENDINGS = (".json", ".jsonl", ".txt", ".csv", ".tsv", ".parquet", ".arrow")


def check_files(run: YamlRun, complete: bool = False) -> Iterator[Finding]:
    """Yields a finding for each file that the run will read and that is missing, not named or of the wrong form.

    ``complete`` says that the command line is applied, so that a file without a name is missing.
    """
    yield from _check_base(run, complete)
    evaluating = run.mode == "eval" or bool(run.at("do_eval"))
    if run.trains and run.rl is None:
        yield from _check_data(run, "train", complete)
    if evaluating:
        yield from _check_data(run, "eval", complete)
    for key in (*_READ, *(("pretrained_model_dir",) if run.base[0] != "pretrained_model_dir" else ())):
        yield from check_path(run, key)
    if isinstance(run.at("context.affinity_config"), str):
        yield from check_path(run, "context.affinity_config")
    for name in _TOKENIZER_FILES:
        for finding in check_path(run, f"processor.tokenizer.{name}"):
            # Training does not read it, but later commands do.
            yield finding if evaluating or not run.trains else dataclasses.replace(finding, severity="warning")


def _check_base(run: YamlRun, complete: bool) -> Iterator[Finding]:
    key, path = run.base
    if not path:
        if complete and run.at("auto_trans_ckpt"):
            yield error(
                "auto_trans_ckpt",
                "auto_trans_ckpt is True, but there is no checkpoint to transform: load_checkpoint is empty.",
                "Pass --load_checkpoint, or --auto_trans_ckpt False.",
            )
        if run.pet_config and not run.at("pretrained_model_dir"):
            fault = "No path is set: the base under the adapter has random weights."
            yield Finding("warning" if complete else "note", key, fault, f"Set it, or pass --{key}.")
        return
    missing = list(check_path(run, key, f"--{key}"))
    yield from missing or _check_form(run, path)


def _check_form(run: YamlRun, path: str) -> Iterator[Finding]:
    """Yields faults of an existing base: it is not a checkpoint, or not in the form that the run reads."""
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
            f"load_checkpoint must be a .ckpt or .safetensors file, or a folder of them, but {path} is {holds} "
            "(--load_checkpoint).",
        )
        return
    # MindFormers reads its newer format only from .safetensors files; quantized bases have no other.
    newer = run.at("checkpoint") or run.at("use_legacy_format") is False
    read = "safetensors" if newer or run.quantizes_base else run.at("load_ckpt_format") or "ckpt"
    if read not in formats and not run.quantizes_base:
        yield error(
            "load_checkpoint",
            f"load_checkpoint: {path} is {' and '.join(formats)}, but load_ckpt_format is {read!r}.",
            f"Set load_ckpt_format: {' or '.join(formats)} (--load_ckpt_format).",
        )


def check_quantized_base(run: YamlRun) -> Iterator[Finding]:
    """Yields an error unless load_checkpoint is quantized if and only if quantize_base is set."""
    path = run.base[1]
    if not path or not os.path.exists(path):
        return
    is_safetensors = path.endswith(".safetensors") and os.path.isfile(path)
    if run.holds_as_stored:
        yield from _check_stored(run, path)
        return
    if run.quantizes_base and not is_safetensors:
        yield error(
            "load_checkpoint",
            f"load_checkpoint: {path} is not a .safetensors file, but pet_config has quantize_base.",
            f"Write a quantized base once: mindlora base quantize {path} base-nf4.safetensors",
        )
    elif run.quantizes_base:
        try:
            quantize.check_quantized_base(path, run.pet_config.get("quantize_exclude"))
        except CheckpointError as refusal:
            yield error("load_checkpoint", str(refusal))
            return
        with TensorFile(path) as file:
            smaller = with_smaller_groups({name: info.shape for name, info in file.tensors.items()})
        if smaller and not run.on_cpu:
            yield error(
                "load_checkpoint",
                f"load_checkpoint: {path} keeps the NF4 of another library ({examples(smaller)}), which operators of a "
                "CPU alone decode.",
                "For an NPU, run mindlora base convert --to hf on the original folder, and quantize the result.",
            )
    elif is_safetensors:
        with TensorFile(path, float8=True) as file:
            quantized = quantize.quantized_paths(file.tensors)
        if quantized:
            yield error(
                "load_checkpoint",
                f"load_checkpoint: {path} is quantized, but pet_config has no quantize_base.",
                "Set quantize_base: nf4, or name a base that is not quantized.",
            )


def _check_stored(run: YamlRun, path: str) -> Iterator[Finding]:
    """Yields why the base cannot be held in the bits in which it is stored."""
    key = f"{PET}.quantize_base"
    if not run.on_cpu:
        device = "quantize_base is as_stored, but operators of a CPU alone multiply by integers."
        yield error(key, device, HOLD_ADVICE)
    elif run.trains and not loads_by_tensor(run):
        loads = "quantize_base is as_stored, but in this run MindFormers loads the base, in float."
        yield error(key, loads, f"Train plain LoRA on whole cells, from load_checkpoint alone. {HOLD_ADVICE}")
    else:
        try:
            with BaseCheckpoint(path) as base:
                base.holding("codes")
        except LoraError as refusal:
            yield error("load_checkpoint", str(refusal))


def _check_data(run: YamlRun, kind: str, complete: bool) -> Iterator[Finding]:
    key = f"{kind}_dataset.data_loader"
    loader = run.at(key)
    if not loader:
        yield error(key, "The node is missing, so the run has no data.", "Name the data in it.")
        return
    for name in _READ_BY_LOADERS:
        unread = name.startswith("tokenizer.") and loader.get("type") == "MindDataset"
        if not unread and _names_files(run.at(f"{kind}_dataset.{name}")):
            yield from check_path(run, f"{kind}_dataset.{name}")
    if loader.get("type") == "BlendedMegatronDatasetDataLoader":
        yield from _check_prefixes(run, f"{key}.config.data_path")
    if loader.get("type") != "MindDataset":
        if _names_files(loader.get("dataset_dir")):
            yield from check_path(run, f"{key}.dataset_dir", f"--{kind}_dataset_dir")
        return
    if loader.get("dataset_files"):
        return
    key = f"{key}.dataset_dir"
    path = loader.get("dataset_dir")
    flag = f"--{kind}_dataset_dir"
    if not path and complete:
        yield error(key, f"{key} is empty.", f"Name a MindRecord, or a folder of them, with {flag}.")
        return
    missing = list(check_path(run, key, flag, "the run has no data"))
    yield from missing
    if not missing and not mindrecord_files(path):
        yield error(
            key, f"{key}: {path} has no file in it that ends in .mindrecord.", f"Correct the path, or pass {flag}."
        )


def _check_prefixes(run: YamlRun, key: str) -> Iterator[Finding]:
    """Yields an error for each prefix of Megatron's files (without .bin and .idx) that matches no file."""
    paths = run.at(key)
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
    """Returns whether a value names files, rather than a dataset of a hub, an address or a pattern of names."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or "*" in name or "://" in name:
            return False
        if not name.startswith((".", "/")) and not name.endswith((*_DATA_ENDINGS, ".mindrecord", ".model")):
            return False
    return True


def check_path(run: YamlRun, key: str, flag: str = "", effect: str = "") -> List[Finding]:
    """Returns a finding if the path at ``key`` does not exist, or is empty and that has an ``effect``."""
    path = run.at(key)
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
