"""mindlora's metadata beside an adapter's tensors: lora_alpha and more, as one string of JSON."""

import json
from types import MappingProxyType
from typing import Any, Callable, Dict, Mapping, Tuple

from mindlora.core.errors import AdapterFormatError, MissingTensorsError
from mindlora.core.numerics import initializers
from mindlora.core.text import listed, shown
from mindlora.files.adapters.adapter import ALPHA, Adapter
from mindlora.files.adapters.dialects import peft_config
from mindlora.models.variants.registry import STORED, VARIANTS

# Its key in the metadata of a safetensors file, which other readers ignore.
KEY = "mindlora"


def text_of(adapter: Adapter) -> str:
    """Returns the metadata of a file under MindFormers' names, which has no configuration beside it."""
    variant = adapter.variant
    content = {
        "alphas": adapter.alphas,
        "use_rslora": adapter.use_rslora,
        # Flags of PEFT's LoRA are always written; other variants only where they apply.
        **{flagged.field: False for flagged in VARIANTS if flagged.peft_flag},
        "dropout": adapter.dropout,
        "selection": adapter.selection,
        "base_model": adapter.base_model,
        "whole": sorted(adapter.saved_modules),
        "embeddings": sorted(adapter.embeddings),
        **_peft_content(adapter),
    }
    if not variant.is_plain:
        content[variant.field] = True
    if variant.shared_parts:
        content["projection_key"] = adapter.projection_key
    if adapter.peft_fields:
        content["peft"] = adapter.peft_fields
    return json.dumps(content)


def header(adapter: Adapter) -> Dict[str, str]:
    """Returns the header of a .safetensors file under MindFormers' names."""
    return {"format": "np", KEY: text_of(adapter)}


def peft_header(adapter: Adapter, settings: Mapping[str, str] = MappingProxyType({})) -> Dict[str, str]:
    """Returns the header of a file for PEFT or diffusers: their ``settings``, and metadata without a field there."""
    # "format" tells transformers which framework to load for.
    return {"format": "pt", **settings, KEY: json.dumps(_peft_content(adapter))}


def _peft_content(adapter: Adapter) -> Dict[str, Any]:
    content: Dict[str, Any] = {"base_fingerprint": adapter.fingerprint}
    if adapter.initialization:
        content["start"] = adapter.initialization
    if adapter.allocation:
        content["adalora"] = adapter.allocation
    return content


def parse(text: str, path: str) -> Dict[str, Any]:
    """Returns the known fields of the metadata in the file at ``path``; raises AdapterFormatError if one is invalid."""
    if not text:
        return {}
    source = f"mindlora's metadata in {path}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{source} is not JSON: {error}. Copy or save the file again.") from error
    if not isinstance(content, dict):
        raise AdapterFormatError(
            f"{source} holds a {type(content).__name__} instead of a JSON object. Copy or save the file again."
        )
    metadata = {field: value for field, value in content.items() if field in _FIELDS and value is not None}
    for field, value in metadata.items():
        is_valid, requirement = _FIELDS[field]
        if not is_valid(value):
            raise AdapterFormatError(f"{source} is damaged: {field} is {shown(value)}; it must be {requirement}.")
    metadata["selection"] = peft_config.selection(metadata.get("selection", {}), source)
    return metadata


def empty_adapter(metadata: Dict[str, Any], dialect: str) -> Adapter:
    """Returns an adapter with the settings in ``metadata``; its tensors and alphas are still to come."""
    return Adapter(
        {},
        dialect=dialect,
        use_rslora=metadata.get("use_rslora", False),
        dropout=float(metadata.get("dropout", 0)),
        selection=metadata.get("selection", {}),
        base_model=metadata.get("base_model"),
        fingerprint=metadata.get("base_fingerprint"),
        initialization=metadata.get("start"),
        allocation=metadata.get("adalora"),
        projection_key=metadata.get("projection_key", 0),
        embeddings=set(metadata.get("embeddings", ())),
        peft_fields=metadata.get("peft", {}),
    )


def complete(adapter: Adapter, metadata: Dict[str, Any], path: str) -> None:
    """Sets lora_alpha of ``adapter``, which has its tensors, and checks that none of them is missing.

    Raises MissingTensorsError if it lacks one, and AdapterFormatError if only some pairs have lora_alpha.
    """
    adapter.alphas.update({path: float(alpha) for path, alpha in metadata.get("alphas", {}).items()})
    for variant in STORED:
        if metadata.get(variant.field) and adapter.variant is not variant:
            raise MissingTensorsError(
                f"{path} lacks the {variant.tensors} that mindlora's metadata in it names. Copy or save the file again."
            )
    pairs = set(adapter.paths)
    modules = set(adapter.saved_modules)
    lost = sorted((set(adapter.alphas) - pairs) | (set(metadata.get("whole", ())) - modules))
    if lost:
        raise MissingTensorsError(
            f"{path} lacks tensors that mindlora's metadata in it names: {', '.join(map(shown, lost))}. Copy or save "
            "the file again."
        )
    if adapter.alphas and pairs != set(adapter.alphas):
        raise AdapterFormatError(
            f"mindlora's metadata in {path} is damaged: it has no lora_alpha for "
            f"{listed(sorted(pairs - set(adapter.alphas)))}."
        )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_table_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))


def _is_peft_fields(value: Any) -> bool:
    return isinstance(value, dict) and _is_list_of_texts(value.get("modules_to_save") or [])


def _is_allocation(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(type(value.get(key)) is int for key in ("rank", "target"))
        and _is_list_of_texts(value.get("left_out"))
    )


# Field -> (test of a value, description of valid values).
_FIELDS: Dict[str, Tuple[Callable[[Any], bool], str]] = {
    "alphas": (_is_table_of(ALPHA.__contains__), "numbers above 0 by path"),
    "use_rslora": (_is_flag, "true or false"),
    **{variant.field: (_is_flag, "true or false") for variant in STORED},
    "projection_key": (lambda value: type(value) is int and 0 <= value < 2**64, "a whole number from 0 to 2^64 - 1"),
    "dropout": (peft_config.DROPOUT.__contains__, peft_config.DROPOUT.words),
    "selection": (lambda value: isinstance(value, dict), "an object"),
    "base_model": (_is_text, "a string"),
    "whole": (_is_list_of_texts, "a list of strings"),
    "embeddings": (_is_list_of_texts, "a list of strings"),
    "base_fingerprint": (_is_table_of(_is_text), "strings by name"),
    "peft": (_is_peft_fields, "an object with the fields of an adapter_config.json"),
    "adalora": (_is_allocation, "an object of rank, target and left_out"),
    "start": (lambda value: _is_text(value) and initializers.changes_base(value), "a lora_init that changes the base"),
}
