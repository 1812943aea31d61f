"""diffusers' pytorch_lora_weights.safetensors: Stable Diffusion's parts in one file, PEFT's settings in its header.

Three generations of keys are read; the first of them is written.

- PEFT's: unet.down_blocks.0.resnets.0.conv1.lora_A.weight
- the earlier one: unet....attn1.to_q.lora.down.weight, text_encoder....q_proj.lora_linear_layer.up.weight
- attention processors: unet....attn1.processor.to_q_lora.down.weight, text_encoder....self_attn.to_q_lora.up.weight

A file without settings has a scale of 1, so lora_alpha is the rank.
"""

import json
import os
import re
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import AdapterError, AdapterFormatError
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.core.json_files import parse_object
from mindlora.core.text import listed
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters import parts
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import foreign, peft, peft_config
from mindlora.files.adapters.dialects.dialect import Dialect, File, Keys, unknown_tensors
from mindlora.models.architectures.diffusion import part_of
from mindlora.models.variants.dora import DORA
from mindlora.models.variants.registry import LORA, PARTS
from mindlora.models.variants.variant import A, B, PartKey

WEIGHTS_FILE = "pytorch_lora_weights.safetensors"
PICKLE_FILE = "pytorch_lora_weights.bin"
SETTINGS = "lora_adapter_metadata"

_ENDINGS = {
    **{part.peft: part.name for part in (A, B, *DORA.parts)},
    ".lora.down.weight": "A",
    ".lora.up.weight": "B",
    ".lora_linear_layer.down.weight": "A",
    ".lora_linear_layer.up.weight": "B",
}
_PROCESSOR = re.compile(r"^(.*)\.to_(q|k|v|out)_lora\.(down|up)\.weight$")
_SIDES = {"down": "A", "up": "B"}


class Diffusers(Dialect):
    """The folder of a pipeline's adapter, or its file alone."""

    name = form = "diffusers"
    weights = (WEIGHTS_FILE, PICKLE_FILE)

    def matches(self, file: File) -> bool:
        return any(map(parse_key, file.keys))

    def sort(self, file: File) -> Keys:
        foreign.refuse_keys(file.keys, file.path)
        part_keys = {key: part_key for key in file.keys if (part_key := parse_key(key))}
        wanted = file.wanted.part
        parts.check_holds(wanted, parts.found_in(path for path, _ in part_keys.values()), file.path)
        if len(part_keys) < len(file.keys):
            raise unknown_tensors(set(file.keys) - set(part_keys), file)
        if wanted is not None:
            part_keys = {key: (path, half) for key, (path, half) in part_keys.items() if parts.split(path)[0] == wanted}
        return Keys(part_keys)

    def complete(self, adapter: Adapter, file: File) -> None:
        take_settings(adapter, file.header, file.path)

    def write(self, adapter: Adapter, path: str) -> None:
        arrays = tensors(adapter)
        with atomic.replace_folder(path) as folder:
            write_arrays(os.path.join(folder, WEIGHTS_FILE), arrays, header(adapter))


def parse_key(key: str) -> Optional[PartKey]:
    """Returns (path that begins with its part, part of the pair) for a key of diffusers, or None for other keys."""
    part, rest = parts.split(key)
    path, side = _module(rest.replace(".processor.", "."))
    if not path or path.startswith(peft.PREFIX):
        return None
    part = part or part_of(path)
    return (f"{part}.{parts.canonical(part, path)}", side) if part else None


def take_settings(adapter: Adapter, header: Mapping[str, str], source: str) -> None:
    """Sets an adapter's settings from its file's header; raises RankMismatchError if its tensors disagree."""
    adapter.check_pairs(source)
    content: Dict[str, Any] = {}
    if header.get(SETTINGS):
        content = parse_object(header[SETTINGS].encode(), f"{SETTINGS} of {source}", AdapterFormatError)
    present = parts.found_in(adapter.paths)
    configs = {part: config for part in present if (config := _config(content, part, source))}
    rslora_roots = {}
    ranks = {}
    for path in adapter.paths:
        part, rest = parts.split(path)
        config = configs.get(part or "")
        rank = adapter.rank(path)
        ranks[path] = config.rank_of(rest) if config else rank
        adapter.alphas[path] = config.alpha_of(rest) if config else float(rank)
        if config and config.use_rslora:
            rslora_roots[path] = rank**0.5
    adapter.check_pairs(source, ranks)
    adapter.use_rslora = len(rslora_roots) == len(ranks)
    if not adapter.use_rslora:
        # An adapter has one rule for all cells, so lora_alpha makes up for the other part's rule.
        for path, root in rslora_roots.items():
            adapter.alphas[path] *= root
    adapter.dropout = max([config.dropout for config in configs.values()], default=0.0)
    adapter.base_model = next((config.base_model for config in configs.values()), None)
    if len(present) == 1 and configs:
        adapter.selection = dict(configs[present[0]].selection)


def tensors(adapter: Adapter) -> Dict[str, np.ndarray]:
    """Returns the tensors under diffusers' keys; raises AdapterError for tensors that diffusers does not load."""
    refuse_others(adapter, Diffusers.form, dora=True)
    return {
        f"{part}.{path}{PARTS[name].peft}": array
        for cell, part, path in parts.with_parts(adapter, Diffusers.form)
        for name, array in adapter.parts(cell).items()
    }


def header(adapter: Adapter) -> Dict[str, str]:
    """Returns the header's strings: PEFT's settings for each part, and mindlora's metadata."""
    by_part: Dict[str, Adapter] = {}
    for cell, part, path in parts.with_parts(adapter, Diffusers.form):
        selection = adapter.selection if part == "unet" else {}
        one = by_part.setdefault(part, Adapter({}, selection=selection))
        # Without text_model: PEFT compares the ends of paths, and newer models do not have this level.
        path = path.replace("text_model.", "", 1)
        one.alphas[path] = adapter.alphas[cell]
        for name, array in adapter.parts(cell).items():
            one.tensors[path, name] = array
    settings: Dict[str, Any] = {}
    for part, one in by_part.items():
        one.use_rslora = adapter.use_rslora
        one.dropout = adapter.dropout
        one.base_model = adapter.base_model
        settings.update({f"{part}.{field}": value for field, value in peft.adapter_config(one).items()})
        settings[f"{part}.task_type"] = None
    return adapter_metadata.peft_header(adapter, {SETTINGS: json.dumps(settings, indent=2, sort_keys=True)})


def refuse_others(adapter: Adapter, form: str, dora: bool = False) -> None:
    """Raises AdapterError if an adapter holds parts that the form has no place for; ``dora`` allows DoRA."""
    if adapter.trained_modules:
        raise AdapterError(
            f"Format {form!r} holds no saved modules (modules_to_save): {', '.join(adapter.trained_modules)}. Write "
            "another format."
        )
    if adapter.embeddings or adapter.variant not in (LORA, *([DORA] if dora else [])):
        what = "embeddings" if adapter.embeddings else adapter.variant.tensors
        raise AdapterError(f"Format {form!r} holds no {what}: {listed(adapter.paths)}. Write format 'peft'.")


def _module(key: str) -> Tuple[str, str]:
    """Returns the path of a cell and the part of its pair, or two empty strings."""
    old = _PROCESSOR.match(key)
    if old:
        clip = ".self_attn" in old[1]
        leaf = f"{old[2]}_proj" if clip else "to_out.0" if old[2] == "out" else f"to_{old[2]}"
        return f"{old[1]}.{leaf}", _SIDES[old[3]]
    for ending, side in _ENDINGS.items():
        if key.endswith(ending):
            return key[: -len(ending)], side
    return "", ""


def _config(content: Dict[str, Any], part: str, source: str) -> Optional[peft_config.PeftConfig]:
    """Returns the settings of a part; a UNet saved alone has them without the part's name."""
    prefix = f"{part}."
    config = {key[len(prefix) :]: value for key, value in content.items() if key.startswith(prefix)}
    if not config and not any(parts.split(key)[0] for key in content):
        config = content
    return peft_config.parse(config, f"{SETTINGS} of {source}, {part}") if config else None
