"""diffusers' pytorch_lora_weights.safetensors: Stable Diffusion's parts in one file, PEFT's settings in its header.

Three generations of keys are read; the first of them is written.

- PEFT's: unet.down_blocks.0.resnets.0.conv1.lora_A.weight
- the one before: unet....attn1.to_q.lora.down.weight, text_encoder....q_proj.lora_linear_layer.up.weight
- attention processors: unet....attn1.processor.to_q_lora.down.weight, text_encoder....self_attn.to_q_lora.up.weight

A file without settings has a scale of 1, so lora_alpha is the rank.
"""

import json
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

import numpy as np

from mindlora.adapters import metadata as adapter_metadata
from mindlora.adapters import parts
from mindlora.adapters.adapter import Adapter
from mindlora.adapters.dialects import peft, peft_config
from mindlora.common.json_files import parse_object
from mindlora.common.text import listed
from mindlora.config.variants.dora import DORA
from mindlora.config.variants.registry import PARTS
from mindlora.config.variants.variant import A, B, PartKey
from mindlora.errors import AdapterError, AdapterFormatError
from mindlora.models.diffusion import part_of

NAME = "diffusers"
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


def parse_key(key: str) -> Optional[PartKey]:
    """Returns (path that begins with its part, part of the pair) for a key of diffusers', or None for any other."""
    part, rest = parts.split(key)
    path, side = _module(rest.replace(".processor.", "."))
    if not path or path.startswith(peft.PREFIX):
        return None
    part = part or part_of(path)
    return (f"{part}.{parts.canonical(part, path)}", side) if part else None


def settings_of(adapter: Adapter, header: Mapping[str, str], source: str) -> None:
    """Gives an adapter that has its tensors the settings in the header of its file, and checks the ranks.

    Args:
        adapter (Adapter): Changed in place.
        header (dict): The strings in the file's header.
        source (str): The file, for messages.

    Raises:
        AdapterFormatError: The settings are not JSON, or one of them has an invalid value.
        RankMismatchError: The tensors have another rank than the settings say.
    """
    adapter.check_pairs(source)
    content = (
        parse_object(header[SETTINGS].encode(), f"{SETTINGS} of {source}", AdapterFormatError)
        if (header.get(SETTINGS))
        else {}
    )
    found = parts.found_in(adapter.paths)
    configs = {part: config for part in found if (config := _config(content, part, source))}
    scales, ranks = {}, {}
    for path in adapter.paths:
        part, rest = parts.split(path)
        config = configs.get(part or "")
        rank = adapter.rank(path)
        ranks[path] = config.rank_of(rest) if config else rank
        adapter.alphas[path] = config.alpha_of(rest) if config else float(rank)
        if config and config.use_rslora:
            scales[path] = rank**0.5
    adapter.check_pairs(source, ranks)
    adapter.use_rslora = len(scales) == len(ranks)
    if not adapter.use_rslora:
        # An adapter has one rule for all cells, so the other part's is put into lora_alpha.
        adapter.alphas.update({path: adapter.alphas[path] * root for path, root in scales.items()})
    adapter.dropout = max([config.dropout for config in configs.values()], default=0.0)
    adapter.base_model = next((config.base_model for config in configs.values()), None)
    if len(found) == 1 and configs:
        adapter.selection = dict(configs[found[0]].selection)


def tensors(adapter: Adapter) -> Dict[str, np.ndarray]:
    """Returns the tensors under diffusers' keys.

    Raises:
        AdapterError: Some cell is of no known part, or the adapter holds what diffusers does not load.
    """
    refuse_others(adapter, NAME, dora=True)
    return {
        f"{part}.{path}{PARTS[name].peft}": array
        for cell, part, path in parts.with_parts(adapter, NAME)
        for name, array in adapter.parts(cell).items()
    }


def header(adapter: Adapter) -> Dict[str, str]:
    """Returns the header's strings: PEFT's settings for each part, and what mindlora notes beside them."""
    places = parts.with_parts(adapter, NAME)
    settings: Dict[str, Any] = {}
    for part in dict.fromkeys(part for _, part, _ in places):
        one = Adapter(
            # Without text_model: PEFT compares the ends of paths, and newer models do not have this level.
            {
                (path.replace("text_model.", "", 1), name): array
                for cell, of, path in places
                if of == part
                for name, array in adapter.parts(cell).items()
            },
            {path.replace("text_model.", "", 1): adapter.alphas[cell] for cell, of, path in places if of == part},
            adapter.use_rslora,
            adapter.dropout,
            selection=adapter.selection if part == "unet" else {},
            base_model=adapter.base_model,
        )
        settings.update({f"{part}.{field}": value for field, value in peft.adapter_config(one).items()})
        settings[f"{part}.task_type"] = None
    return {
        "format": "pt",
        SETTINGS: json.dumps(settings, indent=2, sort_keys=True),
        adapter_metadata.KEY: adapter_metadata.peft_text_of(adapter),
    }


def refuse_others(adapter: Adapter, form: str, dora: bool = False) -> None:
    """Raises AdapterError if an adapter holds what a form of Stable Diffusion has no place for.

    Args:
        adapter (Adapter): The adapter.
        form (str): The form.
        dora (bool): Whether it takes DoRA. Default: False.
    """
    if adapter.saved_modules:
        raise AdapterError(
            f"Format {form!r} holds no saved modules (modules_to_save): {', '.join(adapter.saved_modules)}. Write "
            "another format."
        )
    if adapter.embeddings or adapter.use_vera or adapter.use_dora and not dora:
        what = "embeddings" if adapter.embeddings else adapter.variant.tensors
        raise AdapterError(f"Format {form!r} holds no {what}: {listed(adapter.paths)}. Write format 'peft'.")


def sort(keys: Iterable[str], wanted: parts.Wanted, source: str) -> Tuple[Dict[str, PartKey], List[str]]:
    """Returns key -> PartKey of the wanted part, and the keys that are not diffusers'.

    Raises:
        AdapterError: There is nothing of the wanted part.
    """
    found = {key: parse_key(key) for key in keys}
    part_keys = {key: known for key, known in found.items() if known}
    parts.check_holds(wanted.part, parts.found_in(path for path, _ in part_keys.values()), source)
    chosen = {key: known for key, known in part_keys.items() if wanted.part in (None, parts.split(known[0])[0])}
    return chosen, sorted(set(found) - set(part_keys))


def _module(key: str) -> Tuple[str, str]:
    """Returns the path of a cell and the part of its pair, or two empty texts."""
    old = _PROCESSOR.match(key)
    if old:
        clip = ".self_attn" in old[1]
        leaf = f"{old[2]}_proj" if clip else "to_out.0" if old[2] == "out" else f"to_{old[2]}"
        return f"{old[1]}.{leaf}", _SIDES[old[3]]
    return next(((key[: -len(ending)], side) for ending, side in _ENDINGS.items() if key.endswith(ending)), ("", ""))


def _config(content: Dict[str, Any], part: str, source: str) -> Optional[peft_config.PeftConfig]:
    """Returns the settings of a part; a UNet that was saved by itself has them without the part's name."""
    own = {key[len(part) + 1 :]: value for key, value in content.items() if key.startswith(f"{part}.")}
    own = own or ({} if any(parts.split(key)[0] for key in content) else content)
    return peft_config.parse(own, f"{SETTINGS} of {source}, {part}") if own else None
