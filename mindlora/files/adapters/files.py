"""Reads and writes adapter files in every form of dialects.registry, without a network."""

import contextlib
import dataclasses
import os
from typing import Any, Dict, Iterator, List, Mapping, Optional

import numpy as np
from tqdm import tqdm

from mindlora.core import atomic
from mindlora.core.errors import AdapterError, AdapterFormatError, LoraError
from mindlora.core.formats import ckpt_file, step_folder, torch_pickle
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.text import listed, suggestion
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters import parts
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.dialects import diffusers, foreign, mindformers, mlx, peft, peft_config, pynative
from mindlora.files.adapters.dialects.dialect import File
from mindlora.files.adapters.dialects.peft_config import NO_EXTRAS, Extras
from mindlora.files.adapters.dialects.registry import DIALECTS, FORMS, WEIGHTS, dialect_of


def read(
    path: str, allow_pickle: bool = False, wanted: parts.Wanted = parts.ALL, extras: Extras = NO_EXTRAS
) -> Adapter:
    """Reads an adapter in any known form; tensors of the base and of the optimizer are ignored.

    Args:
        path (str): A folder of PEFT, of diffusers, of mlx-lm or of MindFormers' slora; the folder of a step of
            MindFormers 2's PyNative trainer, or the one in which it saves all steps, for the last of them; or a
            .safetensors, .ckpt or .bin file of these or of kohya.
        allow_pickle (bool): Whether a .bin may be read. It is a pickle; only tensors are taken from it and nothing in
            it is run. Default: False.
        wanted (Wanted): The part of a Stable Diffusion adapter to read, and the network's paths. Default: all of
            it, for any network.
        extras (Extras): Features of PEFT that the caller supports besides plain pairs. Default: none.

    Returns:
        Adapter, whose pairs are complete and have the declared ranks. If it is Stable Diffusion's, its paths begin with
        the part (unet.down_blocks...).

    Raises:
        AdapterFormatError: There is nothing readable at ``path``, it holds no LoRA tensor, its configuration is not
            supported, or its form is known but not read.
        AdapterError: It holds no tensor of the requested part.
        TruncatedAdapterError: The file ends before its content does.
        UnexpectedTensorsError: A PEFT file holds tensors that are neither LoRA's nor of modules_to_save.
        MissingTensorsError, ShapeMismatchError, RankMismatchError: A pair is incomplete, or its shapes do not agree.
    """
    path = str(path)
    atomic.finish_interrupted_swap(path)
    if not os.path.exists(path):
        raise AdapterFormatError(f"{path} does not exist. Check the path.")
    folder = step_folder.last_step(path)
    weights = _weights_in(folder) if os.path.isdir(folder) else path
    if weights != folder or not os.path.isdir(folder):
        _check_file(weights)
    # Read before the weights: they are small, and may already rule these out.
    settings = _settings_beside(weights, path, extras)
    with _opened(weights, allow_pickle) as file:
        file = dataclasses.replace(file, source=path, wanted=wanted, extras=extras, **settings)
        adapter = dialect_of(file).read(file)
    parts.take(adapter, wanted.part, path)
    return adapter


def read_adapters(
    paths: List[str],
    alpha: Optional[float] = None,
    allow_pickle: bool = False,
    wanted: parts.Wanted = parts.ALL,
    extras: Extras = NO_EXTRAS,
) -> List[Adapter]:
    """Returns the adapters at ``paths``, with ``alpha`` for those whose file does not state lora_alpha.

    The other arguments are as in ``read``. Raises ScaleMismatchError if ``alpha`` is given and every file states it.
    """
    progress = tqdm(paths, desc="reading", delay=1, leave=False, disable=None)
    adapters = [read(path, allow_pickle, wanted, extras) for path in progress]
    if alpha is not None:
        without_alpha = [adapter for adapter in adapters if not adapter.alphas]
        for adapter in without_alpha or adapters[:1]:
            adapter.set_alpha(alpha)
    return adapters


def adapter_of_tensors(tensors: Mapping[str, np.ndarray], metadata: Dict[str, Any], source: str) -> Adapter:
    """Returns the adapter made of arrays under MindFormers' or PEFT's names; raises as ``read`` does.

    ``metadata`` is as adapters.metadata.parse returns it; "whole" names the parameters of saved modules.
    """
    file = File(source, list(tensors), tensors.__getitem__, metadata)
    return dialect_of(file).read(file)


def write(adapter: Adapter, path: str, to: str = "peft") -> None:
    """Writes an adapter in one atomic step; an adapter at ``path`` is replaced.

    Args:
        adapter (Adapter): With complete pairs and a known lora_alpha.
        path (str): A folder for "peft", "slora", "pynative" and "diffusers", a file that ends in .safetensors for
            "mindformers", "mcore" and "kohya" and in .ckpt for "ckpt".
        to (str): "peft" for adapter_config.json and adapter_model.safetensors, "mindformers" and "ckpt" for
            MindFormers' own names, "slora" for the folder from which MindFormers serves an adapter, "mcore" for what
            MindFormers' own LoRA on an mcore model reads (see dialects/mcore.py), "pynative" for the folder that its
            PyNative trainer loads, "diffusers" for pytorch_lora_weights.safetensors and "kohya" for one file, both of
            Stable Diffusion. Default: "peft".

    Raises:
        LoraError: ``to`` is unknown or does not suit ``path``, ``path`` is a folder that holds more than an adapter, or
            the form cannot hold some part of the adapter.
        ScaleMismatchError: lora_alpha is unknown.
        NotFiniteError: A tensor holds NaN or infinity.
    """
    check_adapter_output(path, to)
    check_complete(adapter, path)
    FORMS[to].write(adapter, path)


def check_complete(adapter: Adapter, path: str) -> None:
    """Raises AdapterError unless the adapter to write to ``path`` has finite pairs of known scale."""
    if not adapter.tensors:
        raise AdapterError(f"The adapter for {path} holds no pair A and B: give one that adapts at least one cell.")
    adapter.check_finite("The adapter")
    for cell in adapter.paths:
        adapter.scale(cell)


def write_folder(adapter: Adapter, path: str) -> None:
    """Writes an adapter as a folder for its models' library: PEFT, or diffusers for Stable Diffusion.

    PEFT's form holds one network, diffusers' the networks of a pipeline. Raises as ``write`` does.
    """
    write(adapter, path, to="diffusers" if parts.found_in(adapter.paths) else "peft")


def check_adapter_output(path: str, to: str) -> None:
    """Raises LoraError if ``to`` is not in FORMS, or this form cannot be written to ``path``.

    Writing replaces a folder and its contents, so a folder without an adapter, or with subfolders, is refused.
    """
    if to not in FORMS:
        raise LoraError(f"format is {to!r}, which is not known.{suggestion(str(to), list(FORMS))}")
    ending = FORMS[to].ending
    if ending:
        check_file_output(path, to, ending)
    else:
        _check_folder_output(path, to)


def check_file_output(path: str, to: str, ending: str) -> None:
    """Raises LoraError if ``path`` does not have the ending of the file that the form ``to`` writes, or is a folder."""
    if not path.endswith(ending):
        raise LoraError(f"path is {path!r}: format {to!r} writes a file that ends in {ending}.")
    if os.path.isdir(path):
        raise LoraError(
            f"path is {path!r}, where there is a folder, but format {to!r} writes a file. Remove it, or give another "
            "path."
        )


def _check_folder_output(path: str, to: str) -> None:
    if path.endswith((".ckpt", ".safetensors", ".bin")):
        raise LoraError(f"path is {path!r}: format {to!r} writes a folder.")
    if os.path.isfile(path):
        raise LoraError(
            f"path is {path!r}, where there is a file, but format {to!r} writes a folder. Remove it, or give another "
            "path."
        )
    if not os.path.isdir(path):
        return
    names = sorted(os.listdir(path))
    others = names
    if {*WEIGHTS, peft.CONFIG_FILE}.intersection(names):
        others = [name for name in names if os.path.isdir(os.path.join(path, name))]
    if others:
        raise LoraError(
            f"path is {path!r}, a folder that holds more than an adapter: {listed(others)}. It would be replaced with "
            "all that is in it. Give another path."
        )


def _check_file(path: str) -> None:
    if not os.path.isfile(path):
        raise AdapterFormatError(
            f"{path} is not a file but a folder, a device, or a broken link. Copy the file itself there."
        )
    foreign.refuse_file(path)
    step_folder.refuse_part(path)


def _weights_in(folder: str) -> str:
    """Returns the file with the tensors in an adapter folder, or the folder if several hold them."""
    names = sorted(os.listdir(folder))
    for dialect in DIALECTS:
        weights = dialect.weights_in(folder, names)
        if weights is not None:
            return os.path.join(folder, weights) if weights else folder
    foreign.refuse_folder(folder, names, WEIGHTS)


def _settings_beside(weights: str, path: str, extras: Extras) -> Dict[str, Any]:
    """Returns the fields of File from another file beside the weights, if it belongs to the adapter."""
    folder, name = os.path.split(weights)
    config = os.path.join(folder, peft.CONFIG_FILE)
    if (
        os.path.isdir(weights)
        or step_folder.is_step([name])
        or os.path.lexists(os.path.join(folder, pynative.MANIFEST))
    ):
        return {}
    if name in diffusers.Diffusers.weights or mlx.config_beside(weights):
        return {}
    if not os.path.isdir(path) and not (name.startswith("adapter_model.") and os.path.exists(config)):
        return {}
    return {"config": peft_config.read(config, extras)}


@contextlib.contextmanager
def _opened(path: str, allow_pickle: bool) -> Iterator[File]:
    """Yields a file of tensors, from which they can be read."""
    if os.path.isdir(path):
        with step_folder.StepFolder(path) as step:
            yield File(path, list(step.tensors), step.read, {})
    elif path.endswith(".safetensors"):
        with TensorFile(path) as file:
            metadata = adapter_metadata.parse(file.metadata.get(adapter_metadata.KEY, ""), path)
            yield File(path, list(file.tensors), file.read, metadata, file.metadata)
    elif path.endswith(".ckpt"):
        arrays, text = ckpt_file.read(path, mindformers.is_adapter_key)
        if not arrays:
            raise AdapterFormatError(
                f"{path} holds no LoRA tensor: no name in it belongs to an adapter. Give a checkpoint of a LoRA run."
            )
        metadata = adapter_metadata.parse(text, path)
        if metadata.get("whole"):
            arrays.update(ckpt_file.read(path, metadata["whole"].__contains__)[0])
        yield File(path, list(arrays), arrays.__getitem__, metadata)
    elif path.endswith(".bin"):
        if not allow_pickle:
            raise AdapterFormatError(
                f"{path} is a pickle, which can run programs. Ask for safetensors, or allow it "
                "with allow_pickle (--allow-pickle): only tensors are then taken from it."
            )
        arrays = torch_pickle.read(path)
        yield File(path, list(arrays), arrays.__getitem__, {})
    else:
        raise AdapterFormatError(f"{path} must be an adapter folder or a .safetensors, .ckpt or .bin file.")
