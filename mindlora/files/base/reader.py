"""Reads base models' checkpoints tensor by tensor: a folder of safetensors with or without an index, or a single file.

Safetensors are read row by row as requested. A .ckpt is read into memory as a whole.
"""

import contextlib
import copy
import functools
import os
from typing import Dict, Iterable, List, Optional, Union

import numpy as np

from mindlora.core import atomic
from mindlora.core.errors import CheckpointError
from mindlora.core.formats import ckpt_file, step_folder
from mindlora.core.formats.safetensors_file import TensorFile, TensorInfo
from mindlora.core.git_lfs import refuse_pointer
from mindlora.core.json_files import parse_object
from mindlora.core.numerics.nf4 import split_name
from mindlora.core.text import examples
from mindlora.files.base import mcore_view
from mindlora.files.base.quantized.decode import DecodedWeights, decoded_config, decoded_weights
from mindlora.files.base.quantized.stored import StoredTensors, check_held
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import HF, LEGACY, MCORE, Architecture
from mindlora.models.variants.registry import PYNATIVE_INITIAL

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
WORLDS = {HF: "Hugging Face's", LEGACY: "MindFormers'", MCORE: "MindFormers' mcore"}
_OWNERS = {HF: "Hugging Face", LEGACY: "MindFormers", MCORE: "MindFormers' mcore"}
# State that CheckpointMonitor and the optimizers of MindSpore and MindFormers save beside the model's parameters.
_RUN_STATE = (
    *("epoch_num", "step_num", "global_step", "global_batch_size", "current_iterator_step"),
    *("loss_scale", "scale_sense", "last_overflow_iterator_step"),
    *("beta1_power", "beta2_power", "learning_rate", "weight_decay"),
)
# Ends of the names of an adapter's tensors that MindFormers 2 saves with the base.
_ADAPTER_ENDINGS = (".lora_a", ".lora_b", "_lora_a", "_lora_b")
# The files of a model's folder that transformers and MindFormers need besides the tensors.
COMPANIONS = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def companions_in(folder: str) -> List[str]:
    """Returns the paths of the configuration and the tokenizer in a model's folder."""
    paths = (os.path.join(folder, name) for name in COMPANIONS)
    return [path for path in paths if os.path.isfile(path)]


class BaseCheckpoint:
    """A base model's checkpoint that is open for reading; use it in a ``with`` statement.

    Several threads may read at the same time.

    Args:
        path (str): A folder with model.safetensors.index.json and its shards, a folder of .safetensors files without an
            index, a .safetensors file, or a .ckpt file, which is held in memory; or the folder of a step of MindFormers
            2's PyNative trainer, or that of all its steps, for the last one.
        mapped (bool): Whether rows of safetensors stay in the file until they are used: see TensorFile. Default: False.
        decode_to (dtype): The dtype of decoded weights (mindlora.files.base.quantized): they are
            read as if stored in it, under their plain names. Default: None, the dtype of config.json, or
            float32.

    Attributes:
        files (dict): Name of a file -> the open file, in the order of the names.
        tensors (dict): Name of a tensor -> TensorInfo, file by file in the order of the bytes.
        world (str): The tensors' naming: "hf", "mindformers" or "mcore".
        architecture (Architecture): The record that knows their names.
        config (dict): Content of the config.json beside the tensors; empty if there is none. It omits the quantization
            of weights that are decoded here.
        decoded (DecodedWeights or None): The weights that the files hold in a quantized form.
        is_step (bool): Whether it is a step that MindFormers 2's PyNative trainer saved.
        is_pynative (bool): Whether its tensors are named and shaped as in that trainer; here they appear as in mcore
            (see mindlora.files.base.mcore_view).
        expert_heights (dict): Name of an expert weight of such a checkpoint -> rows of each expert.
        adapter_tensors (list of str): The adapter's tensors in such a step. They are in no other attribute.
        bare_prefix (str): The prefix that the names in a bare model's files lack: "model." for
            layers.0...; "" for other files.
        training_state (list of str): Tensors outside the model: the state of an optimizer and of a run, which
            MindFormers' CheckpointMonitor saves with the model. They are in no other attribute.

    Raises CheckpointError if nothing there can be read or the names are not known, AdapterError if a file is damaged.
    """

    def __init__(self, path: str, mapped: bool = False, decode_to: Optional[np.dtype] = None):
        self.path = os.path.abspath(path)
        atomic.finish_interrupted_swap(self.path)
        self.path = step_folder.last_step(self.path)
        self.folder = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        self.files: Dict[str, OpenFile] = {}
        self.expert_heights: Dict[str, int] = {}
        self.adapter_tensors: List[str] = []
        self._file_of: Dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            weight_map = _read_index(self.path)
            file_names = _file_names(self.path, weight_map)
            self.is_step = step_folder.is_step(file_names) or step_folder.METADATA in file_names
            self.is_pynative = self.is_step
            for name in file_names:
                # metadata.json stands for the files of all ranks, which it joins.
                of_ranks = name == step_folder.METADATA
                at = os.path.join(self.folder, name)
                file = step_folder.StepFolder(self.folder) if of_ranks else _open(at, mapped)
                self.files[name] = self._as_mcore(file)
                stack.enter_context(self.files[name])
                self._add(name)
            if weight_map is not None:
                self._check_index(weight_map)
            config = os.path.join(self.folder, CONFIG)
            self.config = _read_object(config) if os.path.isfile(config) else {}
            self.decoded = self._decode(decode_to)
            # An optimizer's tensors are named like its parameters, after a prefix.
            of_parameters = {name for name in self._file_of if name.partition(".")[2] in self._file_of}
            self.training_state = [
                name
                for name in self._file_of
                if name in _RUN_STATE or name in of_parameters or name.startswith(names.TRANSIENT)
            ]
            if self.is_step:
                self.adapter_tensors = [name for name in self._file_of if name.endswith(_ADAPTER_ENDINGS)]
                self._check_unchanged()
            for name in (*self.training_state, *self.adapter_tensors):
                del self._file_of[name]
            self._complete_names()
            self.architecture = names.architecture_of(self.tensors)
            self.world = detect_world(self.path, self.tensors, self.architecture)
            self._stack = stack.pop_all()

    def __enter__(self) -> "BaseCheckpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @functools.cached_property
    def tensors(self) -> Dict[str, TensorInfo]:
        """Name of a tensor -> TensorInfo."""
        return {name: self._info(self._stored[name], file) for name, file in self._file_of.items()}

    @property
    def left_out(self) -> List[str]:
        """Notes for reports: on decoded weights, completed names, training_state, and an adapter's tensors."""
        notes = self.decoded.notes() if self.decoded else []
        if self.bare_prefix:
            notes.append(f"Its names are a bare model's (AutoModel's): read with {self.bare_prefix!r} before them.")
        if self.training_state:
            state = self.training_state
            notes.append(f"Left out, as training's and not the model's: {len(state)} tensors: {examples(state)}.")
        if self.adapter_tensors:
            tensors = self.adapter_tensors
            notes.append(f"Left out of the base, as an adapter's: {len(tensors)} tensors: {examples(tensors)}.")
        return notes

    @property
    def advice_without_head(self) -> str:
        """Advice for a model with untied embeddings whose output head is not among the tensors."""
        if self.bare_prefix:
            return "It is a bare model (AutoModel's), which writes no text: give the model with a head."
        return "Copy the model again."

    @property
    def names_by_file(self) -> Dict[str, List[str]]:
        """Name of a file -> names of its tensors."""
        by_file: Dict[str, List[str]] = {file: [] for file in self.files}
        for name, file in self._file_of.items():
            by_file[file].append(name)
        return by_file

    def read_rows(self, name: str, begin: int, end: int) -> np.ndarray:
        """Returns rows [begin, end) of a tensor along its first axis; a scalar counts as one row."""
        stored = self._stored[name]
        if self.decoded and stored in self.decoded.weights:
            return self.decoded.read_rows(stored, begin, end)
        return self.files[self._file_of[name]].read_rows(stored, begin, end)

    def holding(self, field: str) -> "BaseCheckpoint":
        """Returns the same open checkpoint, which reads quantized weights as one of the tensors that hold their bits.

        ``field`` is "codes", "zeros" or "scales". The output head and the embedding are decoded.

        Raises CheckpointError, with all reasons, if no weight is quantized, or one cannot be held so.
        """
        view = copy.copy(self)
        view.__dict__.pop("tensors", None)
        if self.decoded is None:
            raise CheckpointError(
                f"{self.path} holds no weights in a quantized form, but quantize_base (--quantize-base) is as_stored. "
                "Leave it out, or name the quantized model."
            )
        ends = {self.architecture.head_weight(self.world), self.architecture.embedding_table(self.world)}
        held = [stored for name, stored in self._stored.items() if stored in self.decoded.weights and name not in ends]
        check_held(self.path, self.decoded.weights, held)
        view.decoded = self.decoded._replace(held=frozenset(held), field=field)
        return view

    def companions(self) -> List[str]:
        """Returns the paths of the configuration and the tokenizer in the same folder."""
        return companions_in(self.folder)

    def _info(self, stored: str, file: str) -> TensorInfo:
        if self.decoded and stored in self.decoded.weights:
            return self.decoded.info(stored)
        return self.files[file].tensors[stored]

    def _decode(self, dtype: Optional[np.dtype]) -> Optional[DecodedWeights]:
        """Returns the quantized weights, whose names replace their parts in _file_of; None if there are none."""
        files = {name: file for name, file in self.files.items() if isinstance(file, TensorFile)}
        if len(files) < len(self.files):
            return None
        stored = StoredTensors(self.path, files, self._file_of)
        decoded = decoded_weights(stored, self.config, self.folder, os.path.isdir(self.path), dtype)
        if decoded:
            self._file_of = decoded.renamed(self._file_of)
            self.config = decoded_config(self.config, decoded.dtype)
        return decoded

    def _as_mcore(self, file: "OpenFile") -> "OpenFile":
        """Returns a file of MindFormers 2's PyNative trainer under mcore's names, and other files unchanged."""
        if not isinstance(file, (TensorFile, step_folder.StepFolder)) or not mcore_view.has_its_names(file):
            return file
        self.is_pynative = True
        view = mcore_view.McoreView(file)
        self.expert_heights.update({name: height for name, (_, height, _) in view.experts.items()})
        return view

    def _check_unchanged(self):
        """Raises CheckpointError if a lora_init such as pissa has changed the weights under the adapter."""
        initial = [name for name in self.adapter_tensors if name.endswith(PYNATIVE_INITIAL["A"])]
        if initial:
            raise CheckpointError(
                f"{self.path} holds {examples(initial)}: lora_init of its run, pissa or olora, has changed the base, "
                "which is not the model's any more. Give the base that the run has loaded."
            )

    def _complete_names(self):
        """Renames the tensors of a bare model, such as AutoModel's layers.0..., as in the model with a head."""
        self.bare_prefix = names.missing_prefix(self._file_of)
        self._stored = {names.with_prefix(name, self.bare_prefix): name for name in self._file_of}
        self._file_of = {name: self._file_of[stored] for name, stored in self._stored.items()}

    def _add(self, file):
        twice = [name for name in self.files[file].tensors if name in self._file_of]
        if twice:
            raise CheckpointError(
                f"{self.path} holds {examples(twice)} both in {self._file_of[twice[0]]} and in {file}. "
                "Remove the file that does not belong to the model."
            )
        self._file_of.update(dict.fromkeys(self.files[file].tensors, file))

    def _check_index(self, weight_map):
        absent = [name for name, file in weight_map.items() if self._file_of.get(name) != file]
        if absent:
            raise CheckpointError(
                f"{os.path.join(self.path, INDEX)} lists tensors that are not in the files it names: "
                f"{examples(absent)}. Copy the model again."
            )
        surplus = [name for name in self._file_of if name not in weight_map]
        if surplus:
            raise CheckpointError(
                f"{os.path.join(self.path, INDEX)} does not list {examples(surplus)}, which its "
                "files hold. Copy the model again."
            )


class CkptFile:
    """A MindSpore .ckpt in memory, with the interface of TensorFile; ``metadata`` is empty: there is no header."""

    metadata: Dict[str, str] = {}

    def __init__(self, path: str):
        # MindSpore stores the progress of training, such as epoch_num, under names without a dot.
        self._arrays, _ = ckpt_file.read(path, lambda name: "." in name)
        self.tensors = {
            name: TensorInfo(array.dtype, array.shape, 0, array.nbytes) for name, array in self._arrays.items()
        }

    def __enter__(self) -> "CkptFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._arrays = {}

    def read_rows(self, key: str, begin: int, end: int) -> np.ndarray:
        """Returns a copy of rows [begin, end)."""
        array = self._arrays[key]
        return (array[begin:end] if array.shape else array).copy()


OpenFile = Union[TensorFile, CkptFile, step_folder.StepFolder, mcore_view.McoreView]


def detect_world(path: str, tensor_names: Iterable[str], architecture: Architecture) -> str:
    """Returns the naming of these tensors, "hf", "mindformers" or "mcore", among those that the record knows.

    Raises CheckpointError if no naming matches, or several do.
    """
    kinds: Dict[str, List[str]] = {world: [] for world in WORLDS}
    for name in tensor_names:
        worlds = names.worlds_of(split_name(name)[0], architecture)
        if len(worlds) == 1:
            kinds[worlds[0]].append(name)
    examples_by_world = {world: known for world, known in kinds.items() if known}
    if len(examples_by_world) > 1:
        listed = " and of ".join(f"{_OWNERS[world]} ({examples(known)})" for world, known in examples_by_world.items())
        raise CheckpointError(f"{path} holds names of {listed}. Give a checkpoint of only one model.")
    if not examples_by_world:
        raise CheckpointError(
            f"{path} holds no parameter of a known model ({registry.titles()}), neither under Hugging Face's name "
            "(model.layers.0.self_attn.q_proj.weight) nor under MindFormers' (model.layers.0.attention.wq.weight, or "
            "decoder.layers.0.self_attention.linear_qkv.weight in mcore). "
            f"It holds: {examples(tensor_names) or 'nothing'}. Give a checkpoint of one of these models."
        )
    return next(iter(examples_by_world))


def _file_names(path: str, weight_map: Optional[Dict[str, str]]) -> List[str]:
    if not os.path.exists(path):
        raise CheckpointError(f"{path} does not exist. Check the path.")
    if not os.path.isdir(path):
        if not path.endswith((".safetensors", ".ckpt")):
            raise CheckpointError(f"{path} must be a folder or a .safetensors or .ckpt file.")
        return [os.path.basename(path)]
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    entries = sorted(os.listdir(path))
    file_names = [name for name in entries if name.endswith(".safetensors")]
    if step_folder.is_step(entries):
        file_names = [step_folder.METADATA] if step_folder.METADATA in entries else step_folder.model_files(entries)
        step_folder.check_all_there(path, file_names)
    if not file_names:
        raise CheckpointError(
            f"{path} holds no .safetensors file. It holds: "
            f"{', '.join(sorted(os.listdir(path))[:8]) or 'nothing'}. For a .ckpt, give the path of the file; "
            "save a pytorch_model.bin again with transformers' save_pretrained."
        )
    return file_names


def _read_index(path: str) -> Optional[Dict[str, str]]:
    """Returns tensor -> file, or None if there is no index."""
    index = os.path.join(path, INDEX)
    if not os.path.isfile(index):
        return None
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index} has no weight_map, the table that says which file holds which tensor. Copy the model again."
        )
    for name, file in weight_map.items():
        # An index must not make mindlora read files outside the folder.
        if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", "..") or "\\" in file:
            raise CheckpointError(
                f"{index} says that {name} is in {file!r}, which is not the name of a file in the same folder. "
                "Use a checkpoint from a source that you trust."
            )
        if not os.path.isfile(os.path.join(path, file)):
            raise CheckpointError(
                f"{index} names {file}, which does not exist. Copy the model again, or finish the download."
            )
    return weight_map


def _read_object(path: str) -> dict:
    with open(path, "rb") as file:
        return parse_object(file.read(), path, CheckpointError)


def _open(path: str, mapped: bool) -> Union[TensorFile, CkptFile]:
    refuse_pointer(path, CheckpointError)
    return CkptFile(path) if path.endswith(".ckpt") else TensorFile(path, mapped, float8=True)
