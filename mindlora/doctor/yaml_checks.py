"""What is wrong in a MindFormers YAML, found without building the network and, most of it, without MindFormers."""

import contextlib
import dataclasses
import importlib.util
import io
import logging
import os
import re
import tempfile
import warnings
from typing import Iterator, List, Optional

import yaml

from mindlora.common.text import listed, suggestion
from mindlora.config import PET_TYPES, LoraConfig, check_ratio, dtype_name
from mindlora.errors import ConfigError, LoraError, TargetError
from mindlora.models import targets
from mindlora.models.llama import linear_sizes
from mindlora.models.targets import pattern_value

PET = "model.model_config.pet_config"
SEVERITIES = ("error", "warning", "note")
# PET types that MindFormers handles itself.
_MINDFORMERS_PET_TYPES = ("prefixtuning", "ptuning2", "slora")
_RUN_MODES = ("train", "finetune", "eval", "predict")
# YAML 1.1 wants a point in a number with an exponent.
_NUMBER_AS_TEXT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        severity (str): ``error``, the run fails or does not do what it should; ``warning``, it likely does not;
            ``note``, good to know.
        key (str): Full path of the key in the YAML, or "".
        found (str): What was found.
        advice (str): What to do, or "" where ``found`` says it.
    """

    severity: str
    key: str
    found: str
    advice: str = ""


@dataclasses.dataclass
class _PetConfig(LoraConfig):
    """LoraConfig with the keys more that a pet_config node may have (see plugin/pet.py, which needs MindFormers)."""

    adapter_path: Optional[str] = None
    loraplus_lr_ratio: Optional[float] = None

    def __post_init__(self):
        super().__post_init__()
        if self.loraplus_lr_ratio is not None:
            check_ratio(self.loraplus_lr_ratio, "loraplus_lr_ratio")


def check_yaml(path: str) -> List[Finding]:
    """Returns what is to say of the YAML at ``path``, errors first.

    Args:
        path (str): A complete MindFormers YAML.

    Returns:
        list of Finding.
    """
    try:
        config = _read(path)
    except ConfigError as error:
        return [Finding("error", "", str(error))]
    findings = list(_numbers_as_text(config))
    if config.get("run_mode") not in _RUN_MODES:
        findings.append(
            Finding(
                "error",
                "run_mode",
                f"run_mode is {config.get('run_mode')!r}, which is not known."
                f"{suggestion(str(config.get('run_mode')), list(_RUN_MODES))}",
            )
        )
    lora = _check_pet_config(config, findings)
    is_sound = not any(finding.severity == "error" and finding.key.startswith(PET) for finding in findings)
    if lora is not None:
        findings += _check_targets(config, lora)
        findings += _check_dtypes(config, lora)
    findings += _check_files(config, lora)
    if is_sound:
        findings += _check_as_mindlora_run(path)
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _read(path) -> dict:
    config = _merged(path)
    if not isinstance(_at(config, "model.model_config"), dict):
        raise ConfigError(f"{path} has no model.model_config: it is not a complete YAML of MindFormers.")
    return config


def _merged(path) -> dict:
    """Returns the content of a YAML, laid over that of the files it names as base_config, as MindFormers reads it."""
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no keys: it is not a YAML of MindFormers.")
    bases, merged = config.pop("base_config", []), {}
    for base in [bases] if isinstance(bases, str) else bases:
        merged.update(_merged(os.path.join(os.path.dirname(path), base)))
    return _overlaid(merged, config)


def _overlaid(base, config):
    """Returns ``base`` with the values of ``config`` over its own, node by node."""
    return {
        **base,
        **{
            key: _overlaid(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
            for key, value in config.items()
        },
    }


def _at(config, place):
    """Returns the value at a dotted place, or None."""
    for key in place.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _numbers_as_text(node, place="") -> Iterator[Finding]:
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _numbers_as_text(value, f"{place}.{key}".lstrip("."))
    elif isinstance(node, str) and _NUMBER_AS_TEXT.fullmatch(node):
        whole, exponent = re.split("[eE]", node)
        severity = "error" if place.startswith(("lr_schedule.", "optimizer.", "runner_wrapper.")) else "warning"
        yield Finding(
            severity,
            place,
            f"YAML reads {node} as text, since it has no point or no sign in its exponent.",
            f"Write {float(whole)}e{int(exponent):+d}.",
        )


def _check_pet_config(config, findings) -> Optional[LoraConfig]:
    """Appends to ``findings``; returns the configuration, or None where there is none to check against."""
    pet_config = _at(config, PET)
    if not pet_config:
        findings.append(Finding("note", PET, "There is none: the whole network is trained, without LoRA."))
        return None
    if not isinstance(pet_config, dict):
        findings.append(Finding("error", PET, f"It is {pet_config!r}.", "Give it pet_type, lora_rank, ... as keys."))
        return None
    pet_type = pet_config.get("pet_type")
    if pet_type in _MINDFORMERS_PET_TYPES:
        findings.append(Finding("note", f"{PET}.pet_type", f"{pet_type} is MindFormers' own; it was not checked."))
        return None
    if pet_type not in PET_TYPES:
        known = [*PET_TYPES, *_MINDFORMERS_PET_TYPES]
        findings.append(
            Finding(
                "error",
                f"{PET}.pet_type",
                f"pet_type is {pet_type!r}, which is not known: "
                f"MindFormers would train the whole network.{suggestion(str(pet_type), known)}",
            )
        )
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lora = _PetConfig.from_pet_config(pet_config)
        except LoraError as error:
            findings.append(Finding("error", _key_of(str(error), pet_config), str(error)))
            return None
    findings += [
        Finding("warning", _key_of(str(warning.message), pet_config), str(warning.message)) for warning in caught
    ]
    return lora


def _key_of(message, pet_config) -> str:
    """Returns the place of the key that a message begins with or names as unknown."""
    key = re.match(r"\w+", message)[0]
    unknown = re.search("unknown key '(.*?)'", message)
    key = unknown[1] if unknown else key
    return f"{PET}.{key}" if key in pet_config else PET


def _check_targets(config, lora) -> List[Finding]:
    model_config = config["model"]["model_config"]
    kind = _at(config, "model.arch.type") or model_config.get("type")
    experts = max(_at(node, "moe_config.expert_num") or 1 for node in (config, model_config))
    if kind not in ("LlamaForCausalLM", "LlamaConfig") or experts > 1:
        return [
            Finding(
                "note",
                f"{PET}.target_modules",
                f"The model is {kind}{' with experts' * (experts > 1)}: its "
                "cells are not known here, so targets and ranks were not checked.",
            )
        ]
    try:
        sizes = linear_sizes(model_config)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        return [
            Finding(
                "error",
                "model.model_config",
                f"The sizes of the model cannot be worked out: {error}.",
                "hidden_size, num_layers, num_heads, n_kv_heads, vocab_size and intermediate_size must be "
                "whole numbers.",
            )
        ]
    if lora.target_modules != targets.ALL_LINEAR:
        sizes["model.tok_embeddings"] = sizes["lm_head"]
    findings = []
    with _said_by(targets.logger) as said:
        try:
            selected = targets.select_targets(
                list(sizes), lora.target_modules, lora.exclude_modules, layers=lora.layers_to_transform
            )
        except TargetError as error:
            field = re.match(r"\w+", str(error))[0]
            return [Finding("error", f"{PET}.{field}", str(error))]
    findings += [Finding("warning", f"{PET}.target_modules", text) for text in said]
    cells = {path: lora.for_cell(path) for path in selected}
    count = sum(
        cell.lora_rank * (1 if cell.use_vera else sum(sizes[path])) + (cell.use_dora or cell.use_vera) * sizes[path][0]
        for path, cell in cells.items()
    )
    findings.append(
        Finding("note", f"{PET}.target_modules", f"LoRA on {len(cells)} cells, {count:,} parameters: {listed(cells)}.")
    )
    # VeRA's ranks are larger: it does not train its matrices.
    wasteful = [path for path, cell in cells.items() if cell.lora_rank > min(sizes[path]) and not lora.use_vera]
    if wasteful:
        least = min(min(sizes[path]) for path in wasteful)
        findings.append(
            Finding(
                "warning",
                f"{PET}.lora_rank",
                f"The rank is above the smaller side of {len(wasteful)} "
                f"weights, {least} at the least: {listed(wasteful)}.",
                "No change of a weight has a higher rank than that: lower it, or for these cells "
                "alone with rank_pattern.",
            )
        )
    for field in ("rank_pattern", "alpha_pattern"):
        for expression in getattr(lora, field) or {}:
            if not any(pattern_value({expression: True}, path, False) for path in selected):
                findings.append(
                    Finding(
                        "warning",
                        f"{PET}.{field}",
                        f"{expression!r} matches none of the cells that target_modules selects.",
                        f"They are: {listed(selected)}.",
                    )
                )
    return findings


@contextlib.contextmanager
def _said_by(logger):
    """Yields a list that fills with the warnings of ``logger``, which go nowhere else meanwhile."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield said
    finally:
        logger.handlers, logger.propagate = before


def _check_dtypes(config, lora) -> Iterator[Finding]:
    model_config = config["model"]["model_config"]
    dtypes = {}
    for key in ("param_init_type", "compute_dtype"):
        try:
            dtypes[key] = dtype_name(model_config.get(key) or "float16", key)
        except ConfigError as error:
            yield Finding("error", f"model.model_config.{key}", str(error))
            return
    stored, computed = dtypes["param_init_type"], dtypes["compute_dtype"]
    on_path = lora.compute_dtype or computed
    if _is_training(config) and lora.param_init_type != "float32":
        bits = {"float16": 11, "bfloat16": 8}[lora.param_init_type]
        yield Finding(
            "warning",
            f"{PET}.param_init_type",
            f"A and B are kept in {lora.param_init_type}, which has "
            f"{bits} bits: a step of the optimizer below 1/{2**bits} of a weight is rounded away.",
            "Set it to float32; A and B are small.",
        )
    if _is_training(config) and "float16" in (computed, on_path, lora.param_init_type) and not _scales_loss(config):
        yield Finding(
            "warning",
            "runner_wrapper.scale_sense",
            "Gradients are computed in float16 and the loss is not scaled: small gradients become zero.",
            "Set scale_sense to type: DynamicLossScaleUpdateCell, or compute in bfloat16.",
        )
    if (stored, computed) == ("bfloat16", "float16"):
        yield Finding(
            "warning",
            "model.model_config.compute_dtype",
            "The base is bfloat16 and is computed in float16: "
            "what is above 65504, which bfloat16 can hold, becomes infinite.",
            "Compute in bfloat16.",
        )
    if (stored, computed) == ("float16", "bfloat16"):
        yield Finding(
            "note",
            "model.model_config.param_init_type",
            "The base is kept in float16 and each product rounds it to bfloat16.",
            "Keep it in bfloat16: the same products, without the cast.",
        )
    if on_path == "float16" and computed != "float16":
        yield Finding(
            "warning",
            f"{PET}.compute_dtype",
            f"LoRA computes in float16 on activations of {computed}: what is above 65504 becomes infinite.",
            f"Leave compute_dtype out: LoRA then computes in {computed}.",
        )


def _scales_loss(config) -> bool:
    scale = _at(config, "runner_wrapper.scale_sense")
    return isinstance(scale, dict) or isinstance(scale, (int, float)) and scale > 1


def _is_training(config) -> bool:
    return config.get("run_mode") in ("train", "finetune")


def _check_files(config, lora) -> Iterator[Finding]:
    used = {"train": "train", "finetune": "train", "eval": "eval"}.get(config.get("run_mode"))
    kinds = [kind for kind in ("train", "eval") if kind == used or kind == "eval" and config.get("do_eval")]
    yield from _check_file(
        config, "load_checkpoint", "--load_checkpoint", "the base under the adapter has random weights" if lora else ""
    )
    for kind in ("train", "eval"):
        place = f"{kind}_dataset.data_loader.dataset_dir"
        if (
            kind in kinds
            and _at(config, f"{kind}_dataset.data_loader.type") == "MindDataset"
            and not _at(config, f"{kind}_dataset.data_loader.dataset_files")
        ):
            yield from _check_file(config, place, f"--{kind}_dataset_dir", "there is no data")
        elif kind in kinds and not _at(config, f"{kind}_dataset.data_loader"):
            yield Finding("error", f"{kind}_dataset.data_loader", "It is missing.", "It names the data.")
    yield from _check_file(config, f"{PET}.adapter_path")
    for name in ("vocab_file", "tokenizer_file", "merges_file"):
        yield from _check_file(config, f"processor.tokenizer.{name}")


def _check_file(config, place, flag="", if_empty="") -> Iterator[Finding]:
    path = _at(config, place)
    if not path:
        if if_empty:
            yield Finding("note", place, f"It is empty: {if_empty}.", f"Fill it in, or give {flag}.")
    elif not isinstance(path, str):
        yield Finding("error", place, f"It is {path!r}.", "It must be a path.")
    elif not os.path.exists(path):
        yield Finding(
            "error",
            place,
            f"{path} does not exist, seen from {os.getcwd()}.",
            f"Correct it{f', or give {flag}' if flag else ''}.",
        )


def _check_as_mindlora_run(path) -> Iterator[Finding]:
    """Yields what mindlora-run would refuse before building anything; nothing where MindFormers is not installed."""
    if not all(importlib.util.find_spec(package) for package in ("mindspore", "mindformers")):
        return
    # What MindFormers logs here is not about the YAML. Its log has a file too, under the working folder if nobody says
    # where, and MindSpore writes some of its warnings past Python.
    os.environ.setdefault("GLOG_v", "3")
    with tempfile.TemporaryDirectory(prefix="mindlora-doctor-") as folder, contextlib.redirect_stdout(io.StringIO()):
        os.environ.setdefault("LOG_MF_PATH", folder)
        try:
            from mindformers.tools.register import MindFormerConfig

            from mindlora.plugin import preflight

            preflight.prepare(MindFormerConfig(path))
        except LoraError as error:
            yield Finding("error", "", str(error))
        except Exception as error:
            # MindFormers' own readers raise whatever they meet; so would mindlora-run.
            yield Finding("error", "", f"mindlora-run would stop at it: {type(error).__name__}: {error}")
