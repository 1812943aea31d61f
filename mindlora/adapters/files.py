"""Adapter files without a network: reading every known form, writing four of them."""

import os
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import numpy as np
from tqdm import tqdm

from mindlora.adapters import metadata as adapter_metadata
from mindlora.adapters.adapter import Adapter, is_alpha
from mindlora.adapters.dialects import mindformers, peft, peft_config, slora
from mindlora.adapters.pair_kinds import VARIANTS, PartKey
from mindlora.common import atomic
from mindlora.common.json_files import write_json
from mindlora.common.text import listed, shown, suggestion
from mindlora.errors import AdapterError, AdapterFormatError, LoraError, MissingTensorsError, UnexpectedTensorsError
from mindlora.formats import ckpt_file, torch_pickle
from mindlora.formats.safetensors_file import TensorFile, write_arrays
from mindlora.models import names
from mindlora.numerics.dtypes import FLOATS, dtype_name

_MANIFEST = "mindformers_adapter_config.json"  # MindFormers 2's, beside the adapter's safetensors.
_MAX_NAME = 1000

FORMS = ("peft", "mindformers", "ckpt", "slora")


def read(path: str, allow_pickle: bool = False) -> Adapter:
    """Reads an adapter in any known form; tensors of the base and of the optimizer are ignored.

    Args:
        path (str): A folder of PEFT, of MindFormers' slora or of MindFormers 2; or a .safetensors, .ckpt or .bin file
            of PEFT or MindFormers.
        allow_pickle (bool): Whether a .bin may be read. It is a pickle; only tensors are taken from it and nothing in
            it is run. Default: False.

    Returns:
        Adapter, whose pairs are complete and have the declared ranks.

    Raises:
        AdapterFormatError: There is nothing readable at ``path``, it holds no LoRA tensor, or its configuration is not
            supported.
        TruncatedAdapterError: The file ends before its content does.
        UnexpectedTensorsError: A PEFT file holds tensors that are neither LoRA's nor of modules_to_save.
        MissingTensorsError, ShapeMismatchError, RankMismatchError: A pair is incomplete, or its shapes do not agree.
    """
    path = str(path)
    atomic.finish_interrupted_swap(path)
    if not os.path.exists(path):
        raise AdapterFormatError(f"{path} does not exist.")
    weights = _weights_in(path) if os.path.isdir(path) else path
    if not os.path.isfile(weights):
        raise AdapterFormatError(f"{weights} is not a file but a folder, a device, or a broken link.")
    config = os.path.join(os.path.dirname(weights), peft.CONFIG_FILE)
    described = os.path.isdir(path) or os.path.basename(weights).startswith("adapter_model.") and os.path.exists(config)
    manifest = os.path.join(os.path.dirname(weights), _MANIFEST)
    # Read before the weights: it is small, and may already rule them out.
    declared = peft_config.read(config) if described and not os.path.exists(manifest) else None
    adapter = _read_weights(weights, allow_pickle)
    if declared:
        _apply_config(adapter, declared, path)
    else:
        adapter.check_pairs(path)
        if described:
            adapter.set_alpha(_manifest_alpha(manifest))
    return adapter


def read_adapters(paths: List[str], alpha: Optional[float] = None, allow_pickle: bool = False) -> List[Adapter]:
    """Returns the adapters at ``paths``, with ``alpha`` for those whose file does not state lora_alpha.

    Args:
        paths (list of str): As for ``read``.
        alpha (float): lora_alpha. Default: None.
        allow_pickle (bool): As for ``read``. Default: False.

    Raises:
        AdapterError: There is no usable adapter at one of them.
        ScaleMismatchError: ``alpha`` is given, but every file states lora_alpha.
    """
    progress = tqdm(paths, desc="reading", delay=1, leave=False, disable=None)
    adapters = [read(path, allow_pickle=allow_pickle) for path in progress]
    if alpha is not None:
        for adapter in [adapter for adapter in adapters if not adapter.alphas] or adapters[:1]:
            adapter.set_alpha(alpha)
    return adapters


def write(adapter: Adapter, path: str, to: str = "peft") -> None:
    """Writes an adapter in one atomic step; anything at ``path`` is replaced.

    Args:
        adapter (Adapter): With complete pairs and a known lora_alpha.
        path (str): A folder for "peft" and "slora", a file that ends in .safetensors for "mindformers" and in .ckpt
            for "ckpt".
        to (str): "peft" for adapter_config.json and adapter_model.safetensors, "mindformers" and "ckpt" for
            MindFormers' own names, "slora" for the folder from which MindFormers serves an adapter. Default: "peft".

    Raises:
        LoraError: ``to`` is unknown or does not suit ``path``, or the form cannot hold some part of the adapter.
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
            peft.tensor_key(*key, key[0] in adapter.embeddings): array
            for key, array in adapter.stored_tensors().items()
        }
        tensors.update(
            {peft.saved_module_key(name, adapter.paths): array for name, array in adapter.saved_modules.items()}
        )
        # "format" tells transformers which framework to load for.
        metadata = {"format": "pt", adapter_metadata.KEY: adapter_metadata.peft_text_of(adapter)}
        with atomic.replace_folder(path) as folder:
            write_arrays(os.path.join(folder, peft.WEIGHTS_FILE), tensors, metadata)
            write_json(os.path.join(folder, peft.CONFIG_FILE), peft.adapter_config(adapter))
        return
    _refuse_experts(adapter, to)
    if to == "slora":
        with atomic.replace_folder(path) as folder:
            ckpt_file.write(os.path.join(folder, slora.WEIGHTS_FILE), slora.tensors(adapter), "{}")
            write_json(os.path.join(folder, peft.CONFIG_FILE), slora.config(adapter))
        return
    tensors = {mindformers.tensor_key(*key): array for key, array in adapter.stored_tensors().items()}
    tensors |= adapter.saved_modules
    if to == "ckpt":
        ckpt_file.write(path, tensors, adapter_metadata.text_of(adapter))
    else:
        with atomic.replace_file(path) as written:
            write_arrays(written, tensors, {"format": "np", adapter_metadata.KEY: adapter_metadata.text_of(adapter)})


def check_adapter_output(path: str, to: str) -> None:
    """Raises LoraError if ``to`` is not in FORMS, or ``path`` is not one that this form can be written to."""
    if to not in FORMS:
        raise LoraError(f"format is {to!r}, which is not known.{suggestion(str(to), list(FORMS))}")
    ending = {"ckpt": ".ckpt", "mindformers": ".safetensors"}.get(to, "")
    folder = not ending
    if not folder and not path.endswith(ending) or folder and path.endswith((".ckpt", ".safetensors", ".bin")):
        form = f"file that ends in {ending}" if ending else "folder"
        raise LoraError(f"path is {path!r}: format {to!r} writes a {form}.")
    if os.path.isfile(path) if folder else os.path.isdir(path):
        raise LoraError(
            f"path is {path!r}, where there is a {'file' if folder else 'folder'}, but format {to!r} writes a "
            f"{'folder' if folder else 'file'}. Remove it, or give another path."
        )


def _weights_in(folder: str) -> str:
    """Returns the file with the tensors in an adapter folder."""
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


def _read_weights(path: str, allow_pickle: bool) -> Adapter:
    if path.endswith(".safetensors"):
        with TensorFile(path) as file:
            metadata = adapter_metadata.parse(file.metadata.get(adapter_metadata.KEY, ""), path)
            return _adapter_from(path, list(file.tensors), file.read, metadata)
    if path.endswith(".ckpt"):
        arrays, text = ckpt_file.read(path, mindformers.is_adapter_key)
        if not arrays:
            raise AdapterFormatError(f"{path} holds no LoRA tensor: no name in it belongs to an adapter.")
        metadata = adapter_metadata.parse(text, path)
        if metadata.get("whole"):
            arrays.update(ckpt_file.read(path, metadata["whole"].__contains__)[0])
        return _adapter_from(path, list(arrays), arrays.__getitem__, metadata)
    if path.endswith(".bin"):
        if not allow_pickle:
            raise AdapterFormatError(
                f"{path} is a pickle, which can run programs. Ask for safetensors, or allow it "
                "with allow_pickle (--allow-pickle): only tensors are then taken from it."
            )
        arrays = torch_pickle.read(path)
        return _adapter_from(path, list(arrays), arrays.__getitem__, {})
    raise AdapterFormatError(f"{path} is neither an adapter folder nor a .safetensors, .ckpt or .bin file.")


def _adapter_from(
    path: str, file_keys: List[str], fetch: Callable[[str], np.ndarray], metadata: Dict[str, Any]
) -> Adapter:
    """Returns the adapter of the tensors that ``fetch`` gives for the keys of a file."""
    dialect, part_keys, parameters = _sort_keys(file_keys, metadata.get("whole", ()), path)
    adapter = adapter_metadata.empty_adapter(metadata, dialect)
    for file_key, part_key in part_keys.items():
        array = fetch(file_key)
        # PEFT's keys mark embeddings; in MindFormers' own form, only the path tells.
        if peft.is_embedding_key(file_key) if dialect == peft.NAME else names.is_embedding(part_key[0]):
            adapter.embeddings.add(part_key[0])
        for key, matrix in (mindformers.split_experts(file_key, array) or {part_key: array}).items():
            _check_tensor(file_key, key[0], matrix, path)
            if key in adapter.tensors:
                raise AdapterFormatError(f"{path} holds the {key[1]} of {key[0]} twice, under two names.")
            adapter.tensors[key] = matrix
    adapter.take_shared_projection(path)
    for file_key, parameter in parameters.items():
        array = fetch(file_key)
        _check_tensor(file_key, parameter, array, path)
        if parameter in adapter.saved_modules:
            raise AdapterFormatError(f"{path} holds {parameter} twice, under two names.")
        adapter.saved_modules[parameter] = array
    adapter_metadata.complete(adapter, metadata, path)
    return adapter


def _sort_keys(
    keys: List[str], saved_modules: Iterable[str], path: str
) -> Tuple[str, Dict[str, PartKey], Dict[str, str]]:
    """Returns the dialect's name, key -> PartKey for LoRA's tensors, and key -> parameter for saved modules."""
    if any(peft.parse_key(key) for key in keys):
        part_keys = {key: found for key in keys if (found := peft.parse_key(key))}
        parameters = {key: name for key in keys if key not in part_keys and (name := peft.parse_saved_module_key(key))}
        unknown = sorted(set(keys) - set(part_keys) - set(parameters))
        if unknown:
            raise UnexpectedTensorsError(f"{path} holds tensors that are not LoRA's: {_listed(unknown)}.")
        return peft.NAME, part_keys, parameters
    dialect = mindformers.detect(keys)
    if not dialect:
        raise AdapterFormatError(
            f"{path} holds no LoRA tensor. It holds: {_listed(sorted(keys)[:5]) or 'nothing'}"
            f"{', ...' if len(keys) > 5 else ''}."
        )
    part_keys = {
        key: found
        for key in keys
        if (found := mindformers.parse_expert_key(key) or mindformers.parse_key(key, dialect))
    }
    unknown = sorted(key for key in set(keys) - set(part_keys) if mindformers.is_adapter_key(key))
    if unknown:
        raise UnexpectedTensorsError(
            f"{path} holds LoRA tensors of {dialect.name}, and others in another form: {_listed(unknown)}. "
            "Keep one form in a file."
        )
    return dialect.name, part_keys, {name: name for name in saved_modules if name in keys}


def _check_tensor(key: str, name: str, array: np.ndarray, path: str) -> None:
    # Each part of a path must look like a Python name, so that int() can read every part that str.isdigit accepts.
    if name and not (
        len(name) <= _MAX_NAME and all(part and f"_{part}".replace("-", "_").isidentifier() for part in name.split("."))
    ):
        raise AdapterFormatError(f"{path} holds a tensor named {shown(key)}, which is not the path of a cell.")
    if array.dtype not in FLOATS:
        raise AdapterFormatError(
            f"{path}: {key} is {dtype_name(array.dtype)}, and LoRA's tensors are float32, float16 or bfloat16."
        )


def _apply_config(adapter: Adapter, config: peft_config.PeftConfig, path: str) -> None:
    """Puts the content of adapter_config.json into ``adapter``, and checks its pairs against it."""
    adapter.use_rslora, adapter.dropout, adapter.base_model = config.use_rslora, config.dropout, config.base_model
    for kind in VARIANTS:
        declared = getattr(config, kind.field)
        if declared != (adapter.kind is kind):
            error, found = (MissingTensorsError, "no ") if declared else (UnexpectedTensorsError, "")
            raise error(f"{path}: {kind.field} is {declared}, but the adapter has {found}{kind.tensors}.")
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
            raise MissingTensorsError(f"{path}: modules_to_save names {module!r}, but the file holds no tensor of it.")
    kept = {*adapter.paths, *names.embeddings(), *names.output_heads()}
    unknown = sorted(
        name
        for name in adapter.saved_modules
        if not any(peft.is_of_module(name, module) for module in config.modules_to_save)
        and name.rpartition(".")[0] not in kept
    )
    if unknown:
        raise UnexpectedTensorsError(
            f"{path} holds tensors that are neither LoRA's nor of modules_to_save: {listed(unknown)}."
        )


def _manifest_alpha(path: str) -> float:
    lora_config = peft_config.json_object(path).get("lora_config")
    alpha: Any = lora_config.get("lora_alpha") if isinstance(lora_config, dict) else None
    if not is_alpha(alpha):
        raise AdapterFormatError(f"{path}: lora_config.lora_alpha is {shown(alpha)}; it must be a number above 0.")
    return float(alpha)


def _listed(keys: Iterable[str]) -> str:
    """Returns keys for a message; those with control characters are quoted."""
    return ", ".join(key if key.isprintable() and len(key) <= 200 else shown(key) for key in keys)


def _refuse_joined(adapter: Adapter) -> None:
    joined = [path for path in adapter.paths if names.joined_parts(path)]
    if joined:
        raise AdapterError(
            f"PEFT has no joined modules such as {listed(joined)}. Split them first: give the model's n_kv_heads and "
            "head size."
        )


def _refuse_experts(adapter: Adapter, to: str) -> None:
    experts = [path for path in adapter.paths if ".experts." in path]
    if experts:
        raise AdapterError(
            f"Format {to!r} cannot hold adapters of single experts: {listed(experts)}. Write format 'peft'."
        )
