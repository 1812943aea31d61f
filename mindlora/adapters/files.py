"""Adapter files without a network: reading any form that is known, writing four."""

import json
import os
import sys
from typing import Callable, Dict, Tuple

import numpy as np

from mindlora.adapters.adapter import Adapter, PartKey
from mindlora.adapters.dialects import mindformers, peft, peft_config, slora
from mindlora.common import atomic
from mindlora.common.text import listed, shown, suggestion
from mindlora.errors import AdapterError, AdapterFormatError, LoraError, MissingTensorsError, UnexpectedTensorsError
from mindlora.formats import ckpt_file, torch_pickle
from mindlora.formats.safetensors_file import TensorFile, write_arrays
from mindlora.models import names
from mindlora.numerics import initializers
from mindlora.numerics.dtypes import FLOATS, dtype_name

# What only mindlora knows stands in the metadata of a safetensors file, which other readers pass over.
_METADATA_KEY = "mindlora"
_MANIFEST = "mindformers_adapter_config.json"  # MindFormers 2's, beside the adapter's safetensors.
_MAX_NAME = 1000

# How a configuration asks for a kind of adapter -> the tensors that it has besides.
_KINDS = {"use_dora": "DoRA magnitudes", "use_vera": "VeRA vectors"}

FORMS = ("peft", "mindformers", "ckpt", "slora")


def read(path: str, allow_pickle: bool = False) -> Adapter:
    """Reads an adapter in any form that is known; tensors of the base and of the optimizer are passed over.

    Args:
        path (str): A folder of PEFT's, of MindFormers' slora or of MindFormers 2's; or a .safetensors, .ckpt or .bin
            file, of PEFT's or of MindFormers'.
        allow_pickle (bool): Whether a .bin may be read. It is a pickle, of which only tensors are taken and nothing is
            run. Default: False.

    Returns:
        Adapter, its pairs complete and of the declared ranks.

    Raises:
        AdapterFormatError: Nothing readable stands at ``path``, it holds no LoRA tensor, or its configuration is of
            another kind than what is supported.
        TruncatedAdapterError: The file ends before its content does.
        UnexpectedTensorsError: A PEFT file holds tensors that are neither LoRA's nor of modules_to_save.
        MissingTensorsError, ShapeMismatchError, RankMismatchError: A pair is incomplete or does not fit together.
    """
    path = str(path)
    atomic.finish_interrupted_swap(path)
    if not os.path.exists(path):
        raise AdapterFormatError(f"{path} does not exist.")
    weights = _weights_in(path) if os.path.isdir(path) else path
    if not os.path.isfile(weights):
        raise AdapterFormatError(f"{weights} is no file: a folder, a device, or a link that leads nowhere.")
    config = os.path.join(os.path.dirname(weights), peft.CONFIG_FILE)
    described = os.path.isdir(path) or os.path.basename(weights).startswith("adapter_model.") and os.path.exists(config)
    manifest = os.path.join(os.path.dirname(weights), _MANIFEST)
    # Before the weights: it is small, and says whether they can be used at all.
    declared = peft_config.read(config) if described and not os.path.exists(manifest) else None
    adapter = _read_weights(weights, allow_pickle)
    if declared:
        _apply_config(adapter, declared, path)
    else:
        adapter.check_pairs(path)
        if described:
            adapter.set_alpha(_manifest_alpha(manifest))
    return adapter


def write(adapter: Adapter, path: str, to: str = "peft") -> None:
    """Writes an adapter in one atomic step; what stands at ``path`` is replaced.

    Args:
        adapter (Adapter): Its pairs complete, its lora_alpha known.
        path (str): A folder for "peft" and "slora", a file that ends in .safetensors for "mindformers" and in .ckpt
            for "ckpt".
        to (str): "peft" for adapter_config.json and adapter_model.safetensors, "mindformers" and "ckpt" for
            MindFormers' own names, "slora" for what MindFormers serves many adapters from. Default: "peft".

    Raises:
        LoraError: ``to`` is unknown or does not fit ``path``, or the form has no place for something in the adapter.
        ScaleMismatchError: lora_alpha is not known.
        NotFiniteError: A tensor holds NaN or infinity.
    """
    check_adapter_output(path, to)
    if not adapter.tensors:
        raise AdapterError("The adapter holds no pair, so there is nothing to write.")
    adapter.check_finite("The adapter")
    for cell in adapter.paths:
        adapter.scale(cell)
    if to == "peft":
        _refuse_joined(adapter)
        tensors = {
            peft.tensor_key(*place, place[0] in adapter.embeddings): array
            for place, array in adapter.stored_tensors().items()
        }
        tensors.update(
            {peft.saved_module_key(name, adapter.paths): array for name, array in adapter.saved_modules.items()}
        )
        # "format" tells transformers which framework to load for.
        facts = {"base_fingerprint": adapter.fingerprint, **_start(adapter)}
        metadata = {"format": "pt", _METADATA_KEY: json.dumps(facts)}
        with atomic.replace_folder(path) as folder:
            write_arrays(os.path.join(folder, peft.WEIGHTS_FILE), tensors, metadata)
            _write_json(os.path.join(folder, peft.CONFIG_FILE), peft.adapter_config(adapter))
        return
    _refuse_experts(adapter, to)
    if to == "slora":
        with atomic.replace_folder(path) as folder:
            ckpt_file.write(os.path.join(folder, slora.WEIGHTS_FILE), slora.tensors(adapter), "{}")
            _write_json(os.path.join(folder, peft.CONFIG_FILE), slora.config(adapter))
        return
    tensors = {mindformers.tensor_key(*place): array for place, array in adapter.stored_tensors().items()}
    tensors |= adapter.saved_modules
    if to == "ckpt":
        ckpt_file.write(path, tensors, json.dumps(_facts(adapter)))
    else:
        with atomic.replace_file(path) as written:
            write_arrays(written, tensors, {"format": "np", _METADATA_KEY: json.dumps(_facts(adapter))})


def check_adapter_output(path: str, to: str) -> None:
    """Raises LoraError where ``to`` is no form, or is not what ``path`` looks like or is already."""
    if to not in FORMS:
        raise LoraError(f"format is {to!r}, which is not known.{suggestion(str(to), list(FORMS))}")
    ending = {"ckpt": ".ckpt", "mindformers": ".safetensors"}.get(to, "")
    folder = not ending
    if not folder and not path.endswith(ending) or folder and path.endswith((".ckpt", ".safetensors", ".bin")):
        form = f"file that ends in {ending}" if ending else "folder"
        raise LoraError(f"path is {path!r}: format {to!r} writes a {form}.")
    if os.path.isfile(path) if folder else os.path.isdir(path):
        raise LoraError(
            f"path is {path!r}, where a {'file' if folder else 'folder'} stands, which an adapter with "
            f"format {to!r} cannot replace. Remove it, or give another path."
        )


def _weights_in(folder) -> str:
    """Returns the file of an adapter folder that holds the tensors."""
    for name in (peft.WEIGHTS_FILE, peft.PICKLE_FILE, slora.WEIGHTS_FILE):
        if os.path.lexists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    found = sorted(os.listdir(folder))
    if _MANIFEST in found:
        weights = [name for name in found if name.endswith(".safetensors") and "-opt-" not in name]
        if len(weights) == 1:
            return os.path.join(folder, weights[0])
        raise AdapterFormatError(
            f"{folder} holds {_MANIFEST} with {len(weights)} .safetensors files: "
            f"{', '.join(weights) or 'none'}. Name the folder of one step, with the adapter in "
            "one file."
        )
    raise AdapterFormatError(
        f"{folder} holds no {peft.WEIGHTS_FILE}. It holds: {', '.join(found[:9]) or 'nothing'}"
        f"{', ...' if len(found) > 9 else ''}."
    )


def _read_weights(path, allow_pickle) -> Adapter:
    if path.endswith(".safetensors"):
        with TensorFile(path) as file:
            return _from_tensors(path, list(file.tensors), file.read, file.metadata.get(_METADATA_KEY, ""))
    if path.endswith(".ckpt"):
        arrays, facts = ckpt_file.read(path, mindformers.is_adapter_key)
        if not arrays:
            raise AdapterFormatError(f"{path} holds no LoRA tensor: no name in it is one of an adapter's.")
        whole = _parse_facts(facts, path).get("whole")
        if whole:
            arrays.update(ckpt_file.read(path, whole.__contains__)[0])
        return _from_tensors(path, list(arrays), arrays.__getitem__, facts)
    if path.endswith(".bin"):
        if not allow_pickle:
            raise AdapterFormatError(
                f"{path} is a pickle, which can run programs. Ask for safetensors, or allow it "
                "with allow_pickle (--allow-pickle): only tensors are then taken from it."
            )
        arrays = torch_pickle.read(path)
        return _from_tensors(path, list(arrays), arrays.__getitem__, "")
    raise AdapterFormatError(f"{path} is neither an adapter folder nor a .safetensors, .ckpt or .bin file.")


def _from_tensors(path, keys, fetch: Callable[[str], np.ndarray], facts_text) -> Adapter:
    facts = _parse_facts(facts_text, path)
    dialect, places, whole = _sort_keys(keys, facts.get("whole", ()), path)
    adapter = Adapter(
        {},
        dialect=dialect,
        use_rslora=facts.get("use_rslora", False),
        dropout=float(facts.get("dropout", 0)),
        selection=facts.get("selection", {}),
        base_model=facts.get("base_model"),
        fingerprint=facts.get("base_fingerprint"),
        initialization=facts.get("start"),
        projection_key=facts.get("projection_key", 0),
    )
    adapter.embeddings = set(facts.get("embeddings", ()))
    for key, place in places.items():
        array = fetch(key)
        # MindFormers' own form does not say it of the embedding that each of its models has.
        if peft.is_embedding_key(key) if dialect == peft.NAME else place[0].endswith("tok_embeddings"):
            adapter.embeddings.add(place[0])
        experts = mindformers.split_experts(key, array)
        for found, matrix in (experts or {place: array}).items():
            _check_tensor(key, found[0], matrix, path)
            if found in adapter.tensors:
                raise AdapterFormatError(f"{path} holds the {found[1]} of {found[0]} twice, under two names.")
            adapter.tensors[found] = matrix
    adapter.take_shared_projection(path)
    for key, name in whole.items():
        array = fetch(key)
        _check_tensor(key, name, array, path)
        if name in adapter.saved_modules:
            raise AdapterFormatError(f"{path} holds {name} twice, under two names.")
        adapter.saved_modules[name] = array
    _apply_facts(adapter, facts, path)
    return adapter


def _apply_facts(adapter, facts, path):
    """Puts lora_alpha into ``adapter`` and checks that all is there that mindlora wrote."""
    adapter.alphas.update({cell: float(alpha) for cell, alpha in facts.get("alphas", {}).items()})
    for field, tensors in _KINDS.items():
        if facts.get(field) and not getattr(adapter, field):
            raise MissingTensorsError(f"{path} lacks the {tensors} that mindlora's own record in it names.")
    lost = sorted(
        (set(adapter.alphas) - set(adapter.paths)) | (set(facts.get("whole", ())) - set(adapter.saved_modules))
    )
    if lost:
        raise MissingTensorsError(
            f"{path} lacks tensors that mindlora's own record in it names: {', '.join(map(shown, lost))}."
        )
    silent = sorted(set(adapter.paths) - set(adapter.alphas)) if adapter.alphas else []
    if silent:
        raise AdapterFormatError(
            f"mindlora's own record in {path} is damaged: it says no lora_alpha for {listed(silent)}."
        )


def _sort_keys(keys, whole_names, path) -> Tuple[str, Dict[str, PartKey], Dict[str, str]]:
    """Returns the dialect's name, key -> place for LoRA's tensors, and key -> parameter for those saved whole."""
    if any(peft.parse_key(key) for key in keys):
        places = {key: place for key in keys if (place := peft.parse_key(key))}
        whole = {key: name for key in keys if key not in places and (name := peft.parse_saved_module_key(key))}
        strange = sorted(set(keys) - set(places) - set(whole))
        if strange:
            raise UnexpectedTensorsError(f"{path} holds tensors that are not LoRA's: {_listed(strange)}.")
        return peft.NAME, places, whole
    dialect = mindformers.detect(keys)
    if not dialect:
        raise AdapterFormatError(
            f"{path} holds no LoRA tensor. It holds: {_listed(sorted(keys)[:5]) or 'nothing'}"
            f"{', ...' if len(keys) > 5 else ''}."
        )
    places = {
        key: place for key in keys if (place := mindformers.expert_place(key) or mindformers.parse_key(key, dialect))
    }
    strange = sorted(key for key in set(keys) - set(places) if mindformers.is_adapter_key(key))
    if strange:
        raise UnexpectedTensorsError(
            f"{path} holds LoRA tensors in more than one form: besides those of {dialect.name} {_listed(strange)}."
        )
    return dialect.name, places, {name: name for name in whole_names if name in keys}


def _check_tensor(key, name, array, path):
    # What Python takes for names, so that int takes what str.isdigit tells of: the parts of a path of cells.
    if name and not (
        len(name) <= _MAX_NAME and all(part and f"_{part}".replace("-", "_").isidentifier() for part in name.split("."))
    ):
        raise AdapterFormatError(f"{path} names a tensor {shown(key)}, which is no path of a cell.")
    if array.dtype not in FLOATS:
        raise AdapterFormatError(
            f"{path}: {key} is {dtype_name(array.dtype)}, and LoRA's tensors are float32, float16 or bfloat16."
        )


def _apply_config(adapter, config, path):
    """Puts into ``adapter`` what its adapter_config.json says, and checks its pairs against that."""
    adapter.use_rslora, adapter.dropout, adapter.base_model = config.use_rslora, config.dropout, config.base_model
    for field, tensors in _KINDS.items():
        if getattr(config, field) != getattr(adapter, field):
            kind, found = (MissingTensorsError, "no ") if getattr(config, field) else (UnexpectedTensorsError, "")
            raise kind(f"{path}: {field} is {getattr(config, field)}, and there are {found}{tensors}.")
    adapter.projection_key = config.projection_key
    if adapter.dialect != peft.NAME:
        adapter.check_pairs(path)
        slora.check_rank(adapter, config, path)
        adapter.alphas = slora.alphas(adapter, config)
        return
    adapter.check_pairs(path, {cell: config.rank_of(cell) for cell in adapter.paths})
    adapter.alphas = {cell: config.alpha_of(cell) for cell in adapter.paths}
    adapter.selection = dict(config.selection)
    for module in config.modules_to_save:
        if not any(peft.is_of_module(name, module) for name in adapter.saved_modules):
            raise MissingTensorsError(f"{path}: modules_to_save names {module!r}, and no tensor is that module's.")
    strange = sorted(
        name
        for name in adapter.saved_modules
        if not any(peft.is_of_module(name, module) for module in config.modules_to_save)
        and name.rpartition(".")[0] not in (*adapter.paths, "model.tok_embeddings", "lm_head")
    )
    if strange:
        raise UnexpectedTensorsError(
            f"{path} holds tensors that are neither LoRA's nor of modules_to_save: {listed(strange)}."
        )


def _manifest_alpha(path) -> float:
    described = peft_config.json_object(path).get("lora_config")
    alpha = described.get("lora_alpha") if isinstance(described, dict) else None
    if not _is_alpha(alpha):
        raise AdapterFormatError(f"{path}: lora_config.lora_alpha is {shown(alpha)}, it must be a number above 0.")
    return float(alpha)


def _facts(adapter) -> dict:
    return {
        "alphas": adapter.alphas,
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "dropout": adapter.dropout,
        "selection": adapter.selection,
        "base_model": adapter.base_model,
        "whole": sorted(adapter.saved_modules),
        "embeddings": sorted(adapter.embeddings),
        "base_fingerprint": adapter.fingerprint,
        **_start(adapter),
        **_vera(adapter),
    }


def _start(adapter) -> dict:
    return {"start": adapter.initialization} if adapter.initialization else {}


def _vera(adapter) -> dict:
    return {"use_vera": True, "projection_key": adapter.projection_key} if adapter.use_vera else {}


def _parse_facts(text, path) -> dict:
    if not text:
        return {}
    record = f"mindlora's own record in {path}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(f"{record} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise AdapterFormatError(f"{record} holds a {type(content).__name__} and not a JSON object.")
    facts = {field: value for field, value in content.items() if field in _RECORD and value is not None}
    for field, value in facts.items():
        fits, wanted = _RECORD[field]
        if not fits(value):
            raise AdapterFormatError(f"{record} is damaged: {field} is {shown(value)}, it must be {wanted}.")
    facts["selection"] = peft_config.selection(facts.get("selection", {}), record)
    return facts


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_alpha(value) -> bool:
    return _is_number(value) and 0 < value <= sys.float_info.max


def _is_table(value, fits) -> bool:
    return isinstance(value, dict) and all(map(fits, value.values()))


def _is_text(value) -> bool:
    return isinstance(value, str)


# Field of mindlora's own record -> (what tells whether a value can be, in words).
_RECORD = {
    "alphas": (lambda value: _is_table(value, _is_alpha), "numbers above 0 by path"),
    "use_rslora": (lambda value: isinstance(value, bool), "true or false"),
    "use_dora": (lambda value: isinstance(value, bool), "true or false"),
    "use_vera": (lambda value: isinstance(value, bool), "true or false"),
    "projection_key": (
        lambda value: _is_number(value) and isinstance(value, int) and 0 <= value < 2**64,
        "a whole number from 0 to 2^64 - 1",
    ),
    "dropout": (lambda value: _is_number(value) and 0 <= value < 1, "a number in [0, 1)"),
    "selection": (lambda value: isinstance(value, dict), "an object"),
    "base_model": (_is_text, "a text"),
    "whole": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of texts"),
    "embeddings": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of texts"),
    "base_fingerprint": (lambda value: _is_table(value, _is_text), "texts by name"),
    "start": (lambda value: _is_text(value) and initializers.changes_base(value), "a lora_init that changes the base"),
}


def _listed(keys) -> str:
    """Returns keys for a message; one with control characters is quoted."""
    return ", ".join(key if key.isprintable() and len(key) <= 200 else shown(key) for key in keys)


def _write_json(path, content):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)


def _refuse_joined(adapter):
    joined = [path for path in adapter.paths if names.joined_parts(path)]
    if joined:
        raise AdapterError(
            f"PEFT has no module for {listed(joined)}, which stand for "
            "several. Split them first: give the model's n_kv_heads and head size."
        )


def _refuse_experts(adapter, to):
    experts = [path for path in adapter.paths if ".experts." in path]
    if experts:
        raise AdapterError(
            f"Format {to!r} has no place for adapters of single experts: {listed(experts)}. Write format 'peft'."
        )
