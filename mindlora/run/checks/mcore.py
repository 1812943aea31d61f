"""Checks MindFormers' mcore models (use_legacy: False) in a YAML: which train with mindlora's adapters, and how."""

import os
from typing import Any, Dict, Iterator

from mindlora.core.fields import dtype_name
from mindlora.core.text import listed
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture
from mindlora.models.architectures.mcore_sizes import decoder_sizes
from mindlora.run.checks.base_weights import loads_by_tensor
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import YamlRun

_ROUTER = "decoder.layers.0.mlp.router.weight"
# Settings of the network that serves mcore models: key of model_config -> the value that it must have, if any.
_SERVED_KEYS: Dict[str, Any] = {
    "hidden_act": "silu",
    "rope_scaling": None,
    "add_bias_linear": False,
    "routed_scaling_factor": 1.0,
    "moe_router_enable_expert_bias": False,
    "n_shared_experts": 0,
}
# Its compute dtypes by device, the one to set first.
_SERVED_DTYPES = {"CPU": ("float32",), "Ascend": ("bfloat16", "float16")}
HEAD_MULTIPLE = 16
_HELP = "docs/mcore.md says which mcore models train with adapters."


def check_mcore(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each reason why a YAML of an mcore model with pet_config cannot run."""
    if not run.is_mcore or not run.pet_config:
        return
    family = run.family
    trained = list(registry.trained_mcore_classes().values())
    architecture = registry.by_model_type(family)
    folder = run.at("pretrained_model_dir")
    if family is None and folder and not os.path.isfile(os.path.join(folder, "config.json")):
        yield error(
            "pretrained_model_dir",
            f"use_legacy is False, and the model is to be described by pretrained_model_dir: {folder}, where there is "
            f"no config.json (the current folder is {os.getcwd()}).",
            "Name the folder of the model, with --pretrained_model_dir, or the model in model.model_config."
            "architectures, with its sizes.",
        )
        return
    if architecture is None or (family not in trained and not run.is_classifier) or architecture.legacy:
        yield error(
            "use_legacy",
            f"use_legacy is False and the model is {family or 'not named'}: of MindFormers' mcore models, mindlora "
            f"trains adapters on {', '.join(trained)}.",
            (architecture.instead if architecture else "")
            or f"Remove pet_config, or name one of these in model.model_config.architectures. {_HELP}",
        )
        return
    if run.mode == "predict":
        yield error(
            "run_mode",
            "run_mode is 'predict' and use_legacy is False: MindFormers builds another network to predict, without "
            "cells that take adapters.",
            "Merge the adapter into the base (mindlora base merge) and run that without pet_config, or let mindlora "
            "generate, chat or serve answer.",
        )
    if not run.in_graph_mode:
        yield error(
            "context.mode",
            f"context.mode is {run.at('context.mode')!r} and use_legacy is False: the linear cells of mcore "
            "models run in graph mode alone (Morph).",
            "Set context.mode: 0.",
        )
    yield from _check_base(run)
    yield from _check_balance(run, architecture)
    reason = architecture.unsupported(run.model)
    if reason:
        yield error(f"model.model_config.{reason.split(' ')[0]}", reason)


def check_served(run: YamlRun) -> Iterator[Finding]:
    """Yields an error if a YAML's model is an mcore model that mindlora does not serve, or not with these settings."""
    if not run.is_mcore:
        return
    family = run.family
    architecture = registry.by_model_type(family)
    if architecture is None or not architecture.served:
        served = [one.model_types[0] for one in registry.ARCHITECTURES if one.served]
        yield error(
            "use_legacy",
            f"{family or 'The model'} is one of MindFormers' mcore models (use_legacy: False), of which mindlora "
            f"serves {listed(served)}.",
            "Merge the adapter into the base (mindlora base merge), and serve that with vLLM or MindFormers.",
        )
        return
    target = run.at("context.device_target") or "Ascend"
    if target not in _SERVED_DTYPES:
        yield error(
            "context.device_target",
            f"context.device_target is {target}, and mindlora serves {architecture.title} on {listed(_SERVED_DTYPES)}.",
            "Set --device_target Ascend or --device_target CPU.",
        )
        return
    changes = list(_served_changes(run, architecture, target))
    if changes:
        yield error("model.model_config", f"This model cannot be served on {target}.", f"Set: {'; '.join(changes)}.")
    head_dim = decoder_sizes(architecture, run.model).head_dim
    if target == "Ascend" and head_dim % HEAD_MULTIPLE:
        yield error(
            "model.model_config.head_dim",
            f"model.model_config.head_dim is {head_dim}: MindSpore's PagedAttention on Ascend takes multiples of "
            f"{HEAD_MULTIPLE}.",
            "Serve this model on a CPU: --device_target CPU.",
        )


def _served_changes(run: YamlRun, architecture: Architecture, target: str) -> Iterator[str]:
    model_config = run.model
    rotary = architecture.rotary
    needs = {"position_embedding_type": "rope", "partial_rotary_factor": 1.0, **_SERVED_KEYS}
    if rotary.factor < 1:
        needs["position_embedding_type"] = "partial_rope"
        del needs["partial_rotary_factor"]
    rope = model_config.get("rope_parameters") or {}
    if "rope_theta" in rope and "rope_theta" not in model_config:
        yield f"model.model_config.rope_theta: {rope['rope_theta']} (found in rope_parameters, which is not read)"
    for key, needed in {**needs, "rotary_interleaved": rotary.interleaved}.items():
        found = model_config.get(key)
        if found not in (None, needed):
            yield f"model.model_config.{key}: {'null' if needed is None else needed} (found {found})"
    dtypes = _SERVED_DTYPES[target]
    computed = dtype_name(model_config.get("compute_dtype") or dtypes[0], "compute_dtype")
    if computed not in dtypes:
        yield f"model.model_config.compute_dtype: {dtypes[0]} (found {computed})"


def _check_base(run: YamlRun) -> Iterator[Finding]:
    path = run.base[1]
    whole = path and os.path.isfile(os.path.join(path, "config.json"))
    if whole and not run.in_parallel and not loads_by_tensor(run):
        yield error(
            "load_checkpoint",
            f"load_checkpoint: {path} is a folder of Hugging Face's, which MindFormers cannot load into an mcore model "
            "on one device.",
            f"Convert it once: mindlora base convert {path} base.safetensors --to mcore",
        )


def _check_balance(run: YamlRun, architecture: Architecture) -> Iterator[Finding]:
    asked = [run.model.get(key) for key in ("moe_router_enable_expert_bias", "balance_via_topk_bias")]
    if not next((value for value in asked if value is not None), architecture.expert_bias):
        return
    saved = any(names.belongs_to(_ROUTER, str(module)) for module in run.pet_config.get("modules_to_save") or ())
    if run.callbacks_of("TopkBiasBalanceCallback") and not saved:
        yield error(
            "callbacks",
            "callbacks has TopkBiasBalanceCallback, which changes expert_bias of the base in every step, but no "
            "adapter holds it: the result would be for a base that is gone.",
            "Leave the callback out, or add router to pet_config.modules_to_save.",
        )
