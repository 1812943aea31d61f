"""Checks that load_checkpoint is the base of the YAML's model, since MindFormers leaves missing weights random."""

import os
import re
from typing import Dict, Iterator, Mapping, Optional, Tuple

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.formats import ckpt_file
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.git_lfs import refuse_pointer
from mindlora.core.text import examples
from mindlora.files.base import quantize
from mindlora.files.base.reader import BaseCheckpoint
from mindlora.models import names
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.parallel import is_scattered
from mindlora.run.yaml_run import YamlRun

# Which training runs load their base tensor by tensor, with BaseWeights, and which leave that to MindFormers.

_SAFETENSORS = "safetensors"


def loads_by_tensor(run: YamlRun) -> bool:
    """Returns whether BaseWeights loads the base of a run: it trains an adapter on undivided cells, from safetensors.

    The model is a legacy Llama or an mcore model; MindFormers loads the latter from Hugging Face's folder only to slice
    it, and from no quantized base. If the base is not named or does not exist, load_ckpt_format says whether it will be
    safetensors.

    MindFormers does not draw weights that are replaced either: if load_checkpoint is set, it builds the
    network without values, for training and evaluation, and after loading draws what the checkpoint lacks, but without
    an error. A .ckpt cannot be read tensor by tensor, evaluation has no callback between building and drawing, and
    slices of ranks and the state of a resumed run are MindFormers' own.
    """
    key, path = run.base
    others = ("resume_training", "only_save_strategy", "pretrained_model_dir")
    if not run.trains or key != "load_checkpoint" or any(map(run.at, others)):
        return False
    if run.is_sharded or not run.pet_config:
        return False
    is_llama = run.architecture is not None and "LlamaConfig" in run.architecture.model_types
    if not (run.is_mcore or is_llama):
        return False
    if not path or not os.path.exists(path):
        return run.at("load_ckpt_format") == _SAFETENSORS
    return run.base_is_safetensors and not run.base_holds_adapter


def check_slicing(run: YamlRun) -> Iterator[Finding]:
    """Yields why MindFormers would not slice an undivided base of safetensors for several devices."""
    path = run.base[1]
    newer = run.at("checkpoint") or run.at("use_legacy_format") is False
    reads_safetensors = run.quantizes_base or run.at("load_ckpt_format") == _SAFETENSORS
    if not path or newer or not reads_safetensors or not run.in_parallel or loads_by_tensor(run):
        return
    if os.path.isfile(path) and not os.path.basename(os.path.dirname(path)).startswith("rank_"):
        yield error(
            "load_checkpoint",
            f"load_checkpoint: {path} is a file, but where cells are divided among devices MindFormers reads "
            "safetensors from a folder.",
            "Set parallel.parallel_mode: 0: a quantized base is a file, and each device loads it whole."
            if run.quantizes_base
            else "Name the folder, with no other checkpoint in it.",
        )
    elif os.path.isdir(path) and not is_scattered(path) and not run.at("auto_trans_ckpt"):
        yield error(
            "auto_trans_ckpt",
            f"auto_trans_ckpt is {run.at('auto_trans_ckpt')!r}, and on several devices MindFormers reads whole "
            f"safetensors, as those in {path}, with True alone.",
            "Set auto_trans_ckpt: True and parallel_mode: 1, or name a .ckpt, which every device reads for itself.",
        )


_KEY = "load_checkpoint"


def check_base_weights(run: YamlRun) -> Iterator[Finding]:
    """Yields differences between the weights of load_checkpoint and the model's, in names and shapes.

    In a folder, only the kind of its names is checked. For a quantized base, a model whose cells are not known, or a
    parallel run, whose checkpoint may be divided, only the names of a bare model are searched for.
    """
    path = run.base[1]
    # mindlora itself loads models that only answer.
    if path and os.path.isdir(path) and run.at("run_mode") != "predict" and not loads_by_tensor(run):
        yield from _check_not_quantized(path, run.base[0])
    format_ = run.at("load_ckpt_format")
    expected = {} if run.in_parallel else _shapes_of_model(run)
    file = _file_of(path, format_) if path else None
    # A .ckpt is read as a whole.
    if file is None or not expected and file.endswith(".ckpt"):
        return
    refuse_pointer(file, ConfigError)
    stored = _stored_shapes(file)
    prefix = names.missing_prefix(stored)
    if prefix and not loads_by_tensor(run):
        form = "mcore" if run.is_mcore else "mindformers"
        yield error(
            _KEY,
            f"load_checkpoint: {path} has a bare model's names ({examples(stored)}), where MindFormers looks for those "
            f"with {prefix!r} before them.",
            f"Convert it: mindlora base convert {path} base.safetensors --to {form}",
        )
        return
    if not expected:
        return
    if any(".self_attn." in name for name in stored):
        # MindFormers converts a folder of them itself, if it is configured to read it.
        if file == path or format_ != "safetensors":
            yield error(
                _KEY,
                f"load_checkpoint: {path} has Hugging Face's names.",
                "Name its folder, with load_ckpt_format: safetensors, or convert it: "
                f"mindlora base convert {path} base.safetensors --to mindformers",
            )
    # check_quantized_base says what to do with a quantized base.
    elif file == path and not quantize.quantized_paths(stored):
        yield from _compare(path, stored, expected)


def _check_not_quantized(path: str, key: str) -> Iterator[Finding]:
    """Yields an error if a folder that MindFormers loads itself holds weights that mindlora's reader decodes."""
    try:
        with BaseCheckpoint(path) as base:
            decoded = base.decoded
    except LoraError:
        # Damaged files, and those of other models, are refused when they are read.
        return
    if decoded:
        yield error(
            key,
            f"{key}: {path} holds quantized weights ({'; '.join(decoded.forms)}), but in this run MindFormers loads "
            "the base, which cannot decode them.",
            f"Convert it once: mindlora base convert {path} base --to hf",
        )


def _compare(path: str, stored: Mapping[str, Tuple[int, ...]], expected: Mapping[str, Tuple[int, ...]]):
    missing = [name for name in expected if name not in stored]
    kinds = {_kind(name) for name in expected} - {None}
    unexpected = [name for name in stored if _kind(name) in kinds and name not in expected]
    different = [name for name in expected if name in stored and tuple(stored[name]) != expected[name]]
    if missing:
        yield error(
            _KEY,
            f"load_checkpoint: {path} lacks {examples(missing)}, which would stay random.",
            "Correct the sizes in model_config, or name the base of this model.",
        )
    if unexpected:
        yield error(
            _KEY,
            f"load_checkpoint: {path} has {examples(unexpected)}, which the YAML's model does not have.",
            "Correct num_layers, or name the base of this model.",
        )
    if different:
        name = different[0]
        yield error(
            _KEY,
            f"load_checkpoint: {path} has {name} of shape {tuple(stored[name])}, but the model of the YAML has it of "
            f"{expected[name]} (shapes of {len(different)} weights differ).",
            "Correct the sizes in model_config.",
        )


def _file_of(path: str, format_: Optional[str]) -> Optional[str]:
    """Returns a checkpoint, or the first .safetensors file of a folder; None without one, or if .ckpt is requested."""
    if os.path.isdir(path):
        entries = sorted(os.listdir(path))
        if format_ != "safetensors" and any(name.endswith(".ckpt") for name in entries):
            return None
        return next((os.path.join(path, name) for name in entries if name.endswith(".safetensors")), None)
    return path if os.path.isfile(path) and path.endswith((".ckpt", ".safetensors")) else None


def _shapes_of_model(run: YamlRun) -> Dict[str, Tuple[int, ...]]:
    """Returns the shapes of the model's parameters by name, without its output head; empty if unknown."""
    architecture = run.architecture
    if run.is_mcore or architecture is None or run.quantizes_base:
        return {}
    try:
        sizes = architecture.parameter_sizes(run.model)
    except (TypeError, ValueError, ZeroDivisionError):
        # check_keys names the fault.
        return {}
    # A model whose head is its embedding has no weight for it, and a classifier gets a new one.
    head = f"{architecture.output_head.mindformers}.weight"
    return {name: size.shape for name, size in sizes.items() if name != head}


def _stored_shapes(path: str) -> Dict[str, Tuple[int, ...]]:
    if path.endswith(".ckpt"):
        return ckpt_file.shapes(path)
    with TensorFile(path, float8=True) as file:
        return {name: tensor.shape for name, tensor in file.tensors.items()}


def _kind(name: str) -> Optional[str]:
    """Returns a name without the number of its layer, or None if it has none."""
    kind, count = re.subn(r"\.\d+\.", ".N.", name)
    return kind if count else None
