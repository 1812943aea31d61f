"""Adapter files without a network: reading every known form, writing seven of them."""

import os
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional

import numpy as np
from tqdm import tqdm

from mindlora.adapters import detection, parts, peft_settings, unreadable
from mindlora.adapters import metadata as adapter_metadata
from mindlora.adapters.adapter import Adapter, is_alpha
from mindlora.adapters.dialects import diffusers, kohya, mcore, mindformers, mlx, peft, peft_config, peft_experts, slora
from mindlora.adapters.expert_pairs import single_paths
from mindlora.common import atomic
from mindlora.common.json_files import write_json
from mindlora.common.text import listed, shown, suggestion
from mindlora.errors import AdapterError, AdapterFormatError, LoraError
from mindlora.formats import ckpt_file, torch_pickle
from mindlora.formats.safetensors_file import TensorFile, write_arrays
from mindlora.models import names
from mindlora.numerics.dtypes import FLOATS, dtype_name

_MANIFEST = "mindformers_adapter_config.json"  # MindFormers 2's, beside the adapter's safetensors.
_MAX_NAME = 1000

FORMS = ("peft", "mindformers", "ckpt", "slora", "mcore", "diffusers", "kohya")
# Form -> the ending of the file that it is; the others are folders.
_FILES = {"ckpt": ".ckpt", "mindformers": ".safetensors", "mcore": ".safetensors", "kohya": ".safetensors"}
_WEIGHTS = (
    peft.WEIGHTS_FILE,
    peft.PICKLE_FILE,
    slora.WEIGHTS_FILE,
    diffusers.WEIGHTS_FILE,
    diffusers.PICKLE_FILE,
    mlx.WEIGHTS_FILE,
)


def read(
    path: str, allow_pickle: bool = False, wanted: parts.Wanted = parts.ALL, extras: Optional[peft_config.Extras] = None
) -> Adapter:
    """Reads an adapter in any known form; tensors of the base and of the optimizer are ignored.

    Args:
        path (str): A folder of PEFT, of diffusers, of mlx-lm, of MindFormers' slora or of MindFormers 2; or a
            .safetensors, .ckpt or .bin file of these or of kohya.
        allow_pickle (bool): Whether a .bin may be read. It is a pickle; only tensors are taken from it and nothing in
            it is run. Default: False.
        wanted (Wanted): Which part of a Stable Diffusion adapter, and for a network with which paths. Default: all of
            it, for any.
        extras (Extras): What of PEFT's the caller can take besides plain pairs. Default: None, nothing.

    Returns:
        Adapter, whose pairs are complete and have the declared ranks. If it is Stable Diffusion's, its paths begin with
        the part (unet.down_blocks...).

    Raises:
        AdapterFormatError: There is nothing readable at ``path``, it holds no LoRA tensor, its configuration is not
            supported, or it is of a form that is known and not read.
        AdapterError: There is nothing of the wanted part in it.
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
    unreadable.refuse_file(weights)
    config, manifest = (os.path.join(os.path.dirname(weights), name) for name in (peft.CONFIG_FILE, _MANIFEST))
    by_itself = os.path.basename(weights) in (diffusers.WEIGHTS_FILE, diffusers.PICKLE_FILE) or mlx.config_beside(
        weights
    )
    described = os.path.isdir(path) or os.path.basename(weights).startswith("adapter_model.") and os.path.exists(config)
    described = described and not by_itself
    # Read before the weights: it is small, and may already rule them out.
    declared = peft_config.read(config, extras) if described and not os.path.exists(manifest) else None
    refusals = extras.refusals if extras else None
    adapter = _read_weights(weights, allow_pickle, wanted, refusals)
    if declared:
        peft_settings.apply(adapter, declared, path, refusals)
    else:
        adapter.check_pairs(path)
        if adapter.token_rows:
            raise AdapterFormatError(
                f"{path} holds rows of {listed(adapter.token_rows)}, and which rows they are is in the "
                "adapter_config.json beside it: give the folder of both."
            )
        if described:
            adapter.set_alpha(_manifest_alpha(manifest))
    parts.take(adapter, wanted.part, path)
    return adapter


def read_adapters(
    paths: List[str],
    alpha: Optional[float] = None,
    allow_pickle: bool = False,
    wanted: parts.Wanted = parts.ALL,
    extras: Optional[peft_config.Extras] = None,
) -> List[Adapter]:
    """Returns the adapters at ``paths``, with ``alpha`` for those whose file does not state lora_alpha.

    Args:
        paths (list of str): As for ``read``.
        alpha (float): lora_alpha. Default: None.
        allow_pickle (bool): As for ``read``. Default: False.
        wanted (Wanted): As for ``read``. Default: all.
        extras (Extras): As for ``read``. Default: None.

    Raises:
        AdapterError: There is no usable adapter at one of them.
        ScaleMismatchError: ``alpha`` is given, but every file states lora_alpha.
    """
    progress = tqdm(paths, desc="reading", delay=1, leave=False, disable=None)
    adapters = [read(path, allow_pickle, wanted, extras) for path in progress]
    if alpha is not None:
        for adapter in [adapter for adapter in adapters if not adapter.alphas] or adapters[:1]:
            adapter.set_alpha(alpha)
    return adapters


def adapter_of_tensors(tensors: Mapping[str, np.ndarray], metadata: Dict[str, Any], source: str) -> Adapter:
    """Returns the adapter that named arrays make up.

    Args:
        tensors (mapping): Name in one of MindFormers' forms, or in PEFT's -> array.
        metadata (dict): As adapters.metadata.parse returns it; "whole" names the parameters of saved modules.
        source (str): Where they come from, for messages.

    Raises:
        AdapterError: They are no adapter, as in ``read``.
    """
    adapter = _adapter_from(source, list(tensors), tensors.__getitem__, metadata)
    adapter.check_pairs(source)
    return adapter


def write(adapter: Adapter, path: str, to: str = "peft") -> None:
    """Writes an adapter in one atomic step; an adapter at ``path`` is replaced.

    Args:
        adapter (Adapter): With complete pairs and a known lora_alpha.
        path (str): A folder for "peft", "slora" and "diffusers", a file that ends in .safetensors for "mindformers",
            "mcore" and "kohya" and in .ckpt for "ckpt".
        to (str): "peft" for adapter_config.json and adapter_model.safetensors, "mindformers" and "ckpt" for
            MindFormers' own names, "slora" for the folder from which MindFormers serves an adapter, "mcore" for what
            MindFormers' own LoRA on an mcore model reads (see dialects/mcore.py), "diffusers" for
            pytorch_lora_weights.safetensors and "kohya" for one file, both of Stable Diffusion. Default: "peft".

    Raises:
        LoraError: ``to`` is unknown or does not suit ``path``, ``path`` is a folder that holds more than an adapter, or
            the form cannot hold some part of the adapter.
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
        _write_peft(adapter, path)
        return
    if to == "diffusers":
        tensors = diffusers.tensors(adapter)
        with atomic.replace_folder(path) as folder:
            write_arrays(os.path.join(folder, diffusers.WEIGHTS_FILE), tensors, diffusers.header(adapter))
        return
    if to == "kohya":
        tensors = kohya.tensors(adapter)
        with atomic.replace_file(path) as written:
            write_arrays(written, tensors, kohya.header(adapter))
        return
    _refuse_experts(adapter, to)
    if to == "mcore":
        adapter = mcore.one_rank(adapter)
        metadata = {"format": "np", adapter_metadata.KEY: adapter_metadata.text_of(adapter)}
        with atomic.replace_file(path) as written:
            write_arrays(written, mcore.tensors(adapter), metadata)
        return
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


def _write_peft(adapter: Adapter, path: str) -> None:
    _refuse_joined(adapter)
    tensors = {
        peft.tensor_key(*key, key[0] in adapter.embeddings): array
        for key, array in peft_experts.flattened(adapter, adapter.stored_tensors()).items()
    }
    tensors.update({peft.saved_module_key(name, adapter.paths): array for name, array in adapter.saved_modules.items()})
    tensors.update({peft.token_rows_key(cell): rows for cell, (_, rows) in adapter.token_rows.items()})
    # "format" tells transformers which framework to load for.
    metadata = {"format": "pt", adapter_metadata.KEY: adapter_metadata.peft_text_of(adapter)}
    with atomic.replace_folder(path) as folder:
        write_arrays(os.path.join(folder, peft.WEIGHTS_FILE), tensors, metadata)
        write_json(os.path.join(folder, peft.CONFIG_FILE), peft.adapter_config(adapter))


def write_folder(adapter: Adapter, path: str) -> None:
    """Writes an adapter as a folder that the library of its models loads: PEFT's, or of Stable Diffusion diffusers'.

    Args:
        adapter (Adapter): The adapter. PEFT's form holds one network, diffusers' those of a pipeline.
        path (str): The folder.

    Raises:
        LoraError, ScaleMismatchError, NotFiniteError: As in write.
    """
    write(adapter, path, to="diffusers" if parts.found_in(adapter.paths) else "peft")


def check_adapter_output(path: str, to: str) -> None:
    """Raises LoraError if ``to`` is not in FORMS, or ``path`` is not one that this form can be written to.

    Writing replaces a folder with all that is in it, so one without an adapter, or with folders in it, is refused.
    """
    if to not in FORMS:
        raise LoraError(f"format is {to!r}, which is not known.{suggestion(str(to), list(FORMS))}")
    ending = _FILES.get(to, "")
    folder = not ending
    if not folder and not path.endswith(ending) or folder and path.endswith((".ckpt", ".safetensors", ".bin")):
        form = f"file that ends in {ending}" if ending else "folder"
        raise LoraError(f"path is {path!r}: format {to!r} writes a {form}.")
    if os.path.isfile(path) if folder else os.path.isdir(path):
        raise LoraError(
            f"path is {path!r}, where there is a {'file' if folder else 'folder'}, but format {to!r} writes a "
            f"{'folder' if folder else 'file'}. Remove it, or give another path."
        )
    found = sorted(os.listdir(path)) if folder and os.path.isdir(path) else []
    adapter = {*_WEIGHTS, peft.CONFIG_FILE}.intersection(found)
    others = [name for name in found if not adapter or os.path.isdir(os.path.join(path, name))]
    if others:
        raise LoraError(
            f"path is {path!r}, a folder that holds more than an adapter: {listed(others)}. It would be replaced with "
            "all that is in it. Give another path."
        )


def _weights_in(folder: str) -> str:
    """Returns the file with the tensors in an adapter folder."""
    for name in _WEIGHTS:
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
    unreadable.refuse_folder(folder, found, _WEIGHTS)


def _read_weights(path: str, allow_pickle: bool, wanted: parts.Wanted, refusals: Optional[List[str]] = None) -> Adapter:
    if path.endswith(".safetensors"):
        with TensorFile(path) as file:
            metadata = adapter_metadata.parse(file.metadata.get(adapter_metadata.KEY, ""), path)
            return _adapter_from(path, list(file.tensors), file.read, metadata, file.metadata, wanted, refusals)
    if path.endswith(".ckpt"):
        arrays, text = ckpt_file.read(path, mindformers.is_adapter_key)
        if not arrays:
            raise AdapterFormatError(f"{path} holds no LoRA tensor: no name in it belongs to an adapter.")
        metadata = adapter_metadata.parse(text, path)
        if metadata.get("whole"):
            arrays.update(ckpt_file.read(path, metadata["whole"].__contains__)[0])
        return _adapter_from(path, list(arrays), arrays.__getitem__, metadata, wanted=wanted)
    if path.endswith(".bin"):
        if not allow_pickle:
            raise AdapterFormatError(
                f"{path} is a pickle, which can run programs. Ask for safetensors, or allow it "
                "with allow_pickle (--allow-pickle): only tensors are then taken from it."
            )
        arrays = torch_pickle.read(path)
        return _adapter_from(path, list(arrays), arrays.__getitem__, {}, wanted=wanted, refusals=refusals)
    raise AdapterFormatError(f"{path} is neither an adapter folder nor a .safetensors, .ckpt or .bin file.")


def _adapter_from(
    path: str,
    keys: List[str],
    fetch: Callable[[str], np.ndarray],
    metadata: Dict[str, Any],
    header: Mapping[str, str] = MappingProxyType({}),
    wanted: parts.Wanted = parts.ALL,
    refusals: Optional[List[str]] = None,
) -> Adapter:
    """Returns the adapter of the tensors that ``fetch`` gives for a file's keys, and the strings in its header."""
    saved_modules, beside = tuple(metadata.get("whole", ())), mlx.config_beside(path)
    file = detection.File(path, keys, lambda key: fetch(key).shape, header, saved_modules, beside, wanted, refusals)
    found = detection.sort_keys(file)
    adapter = adapter_metadata.empty_adapter(metadata, found.dialect)
    for file_key, part_key in found.part_keys.items():
        array = fetch(file_key)
        # PEFT's keys mark embeddings; in other forms, only the path tells.
        if peft.is_embedding_key(file_key) if found.dialect == peft.NAME else names.is_embedding(part_key[0]):
            adapter.embeddings.add(part_key[0])
        for key, matrix in (mindformers.split_experts(file_key, array) or {part_key: array}).items():
            _check_tensor(file_key, key[0], matrix, path, any_dtype=key[1] == kohya.ALPHA)
            if key in adapter.tensors:
                raise AdapterFormatError(f"{path} holds the {key[1]} of {key[0]} twice, under two names.")
            adapter.tensors[key] = matrix
    adapter.take_shared_projection(path)
    for file_key, parameter in found.parameters.items():
        array = fetch(file_key)
        _check_tensor(file_key, parameter, array, path)
        if parameter in adapter.saved_modules:
            raise AdapterFormatError(f"{path} holds {parameter} twice, under two names.")
        adapter.saved_modules[parameter] = array
    for file_key, cell in found.token_rows.items():
        array = fetch(file_key)
        _check_tensor(file_key, cell, array, path)
        # Which rows these are, the configuration says.
        adapter.token_rows[cell] = np.empty(0, np.int64), array
    found.complete(adapter)
    adapter_metadata.complete(adapter, metadata, path)
    if found.dialect == mindformers.MCORE.name:
        mcore.without_zeros(adapter)
    return adapter


def _check_tensor(key: str, name: str, array: np.ndarray, path: str, any_dtype: bool = False) -> None:
    # Each part of a path must look like a Python name, so that int() can read every part that str.isdigit accepts.
    if name and not (
        len(name) <= _MAX_NAME and all(part and f"_{part}".replace("-", "_").isidentifier() for part in name.split("."))
    ):
        raise AdapterFormatError(f"{path} holds a tensor named {shown(key)}, which is not the path of a cell.")
    if not any_dtype and array.dtype not in FLOATS:
        raise AdapterFormatError(
            f"{path}: {key} is {dtype_name(array.dtype)}, and LoRA's tensors are float32, float16 or bfloat16."
        )


def _manifest_alpha(path: str) -> float:
    lora_config = peft_config.json_object(path).get("lora_config")
    alpha: Any = lora_config.get("lora_alpha") if isinstance(lora_config, dict) else None
    if not is_alpha(alpha):
        raise AdapterFormatError(f"{path}: lora_config.lora_alpha is {shown(alpha)}; it must be a number above 0.")
    return float(alpha)


def _refuse_joined(adapter: Adapter) -> None:
    joined = [path for path in adapter.paths if names.joined_parts(path) and not names.in_hugging_face(path)]
    if joined:
        raise AdapterError(
            f"PEFT has no joined modules such as {listed(joined)}. Split them first: give the model's n_kv_heads and "
            "head size."
        )


def _refuse_experts(adapter: Adapter, to: str) -> None:
    experts = single_paths(adapter)
    if experts:
        raise AdapterError(
            f"Format {to!r} cannot hold adapters of single experts: {listed(experts)}. Write format 'peft', or "
            "stack them (mindlora convert --experts stacked)."
        )
