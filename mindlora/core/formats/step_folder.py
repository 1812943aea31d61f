"""MindFormers 2's folders of saved steps: the files that hold the model, and how the parts of several ranks join.

A run saves iteration_00000010, ... and a tracker with the number of the last step. In such a folder each rank has a
file of the model and one of the optimizer, and metadata.json says which part of which tensor is in which file. A run of
one rank has whole tensors and no metadata.json.
"""

import contextlib
import itertools
import math
import os
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Set, Tuple

import numpy as np

from mindlora.core.errors import AdapterFormatError
from mindlora.core.formats.safetensors_file import TensorFile, TensorInfo
from mindlora.core.json_files import parse_object
from mindlora.core.text import listed, shown

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.json"
METADATA = "metadata.json"
# mindlora's addition to the folder of a step: lora_config and pet_config of the run, and its callbacks' state.
RUN = "mindlora_run.json"
# The state of a train step besides the optimizer's, name -> array.
ARRAYS = "mindlora_run.npz"
# The content of COMMON before a run has begun; the trainer reads it beside every checkpoint.
NEW_RUN = {"epoch_num": 1, "step_num": 0, "global_step": 0, "loss_scale": 1.0, "global_batch_size": 1}
_STEP = "iteration_"
_FILE = re.compile(r"(?:.+-)?(?P<kind>model|opt)-(?P<rank>\d{7})-(?P<ranks>\d{7})\.safetensors")
_MAX_TRACKER = 64


class _Part(NamedTuple):
    """A part of a tensor.

    Attributes:
        file (str): The name of the file that holds it.
        offset (tuple of int): Its beginning in the whole tensor.
        shape (tuple of int): Its shape.
    """

    file: str
    offset: Tuple[int, ...]
    shape: Tuple[int, ...]


def file_name(index: int, files: int) -> str:
    """Returns the name of a file of a model that is divided into ``files`` files."""
    return f"checkpoint-model-{index:07d}-{files:07d}.safetensors"


def name_of(step: int) -> str:
    """Returns the name of the folder of a step."""
    return f"{_STEP}{step:08d}"


def is_step(names: Sequence[str]) -> bool:
    """Returns whether a folder with these files is the folder of a step."""
    return any(map(_FILE.fullmatch, names))


def is_whole(name: str) -> bool:
    """Returns whether a file holds all of a model, judged by its name."""
    match = _FILE.fullmatch(name)
    return match is None or int(match["ranks"]) == 1


def refuse_part(path: str) -> None:
    """Raises AdapterFormatError for the file of one rank if the metadata.json beside it says how all of them join."""
    folder, name = os.path.split(path)
    if not is_whole(name) and os.path.isfile(os.path.join(folder, METADATA)):
        raise AdapterFormatError(
            f"{path} is the part that one rank holds. Give the folder {folder or '.'}, where {METADATA} says how the "
            "parts of all ranks join."
        )


def last_step(folder: str) -> str:
    """Returns the folder of the last step of the run that saves in ``folder``, or ``folder`` itself without such a run.

    Raises:
        AdapterFormatError: The tracker names a step that does not exist.
    """
    tracker = os.path.join(folder, TRACKER)
    if not os.path.isfile(tracker):
        return folder
    steps = sorted(name for name in os.listdir(folder) if name.startswith(_STEP))
    if not steps:
        # Megatron's tracker has the same name, and other folders beside it.
        return folder
    with open(tracker, encoding="utf-8", errors="replace") as file:
        text = file.read(_MAX_TRACKER).strip()
    name = name_of(int(text)) if text.isdecimal() else ""
    if name not in steps:
        raise AdapterFormatError(
            f"{tracker} says that the last step is {shown(text)}, but there are {listed(steps)}. Give the folder of "
            "one step."
        )
    return os.path.join(folder, name)


def model_files(names: Sequence[str]) -> List[str]:
    """Returns the files in a step's folder that hold the model."""
    matches = {name: _FILE.fullmatch(name) for name in names if name.endswith(".safetensors")}
    return [name for name, match in matches.items() if (match is None and "opt-" not in name) or _is_model(match)]


class StepFolder:
    """The model in a step's folder, read as if it was in one file: with the interface of TensorFile.

    Args:
        path (str): The folder.

    Attributes:
        tensors (dict): Key -> TensorInfo of the whole tensor.
        metadata (dict): Empty: the files of several ranks have no header in common.

    Raises:
        AdapterFormatError: Files are missing, or nothing says how their parts make up a tensor.
        TruncatedAdapterError: A file ends before its content does.
    """

    metadata: Dict[str, str] = {}

    def __init__(self, path: str):
        self.path = str(path)
        names = sorted(os.listdir(self.path))
        self._files: Dict[str, TensorFile] = {}
        with contextlib.ExitStack() as stack:
            if METADATA in names:
                self._parts = _parts_in_metadata(self.path)
                self._open({part.file for parts in self._parts.values() for part in parts}, stack)
            else:
                check_all_there(self.path, model_files(names))
                self._open(model_files(names), stack)
                self._parts = self._whole_tensors()
            self.tensors = {key: self._joined(key, parts) for key, parts in self._parts.items()}
            self._stack = stack.pop_all()

    def __enter__(self) -> "StepFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, key: str) -> np.ndarray:
        """Returns a whole tensor in its stored dtype."""
        return self.read_rows(key, 0, (self.tensors[key].shape or (1,))[0])

    def read_rows(self, key: str, begin: int, end: int) -> np.ndarray:
        """Returns rows [begin, end) of a tensor along its first axis; a scalar counts as one row."""
        info = self.tensors[key]
        parts = self._parts[key]
        if not info.shape:
            return self._files[parts[0].file].read(key)
        rows = np.empty((end - begin, *info.shape[1:]), info.dtype)
        for part in parts:
            above = part.offset[0]
            first = max(begin, above)
            last = min(end, above + part.shape[0])
            if first < last:
                columns = [slice(start, start + size) for start, size in zip(part.offset[1:], part.shape[1:])]
                block = self._files[part.file].read_rows(key, first - above, last - above)
                rows[(slice(first - begin, last - begin), *columns)] = block
        return rows

    def _open(self, names: Iterable[str], stack: contextlib.ExitStack) -> None:
        for name in sorted(names):
            path = os.path.join(self.path, name)
            if not os.path.isfile(path):
                raise AdapterFormatError(f"{path} is missing, but {METADATA} names it. Copy the folder again.")
            self._files[name] = stack.enter_context(TensorFile(path))

    def _whole_tensors(self) -> Dict[str, List[_Part]]:
        """Returns the tensors of files without metadata.json, in which each must be whole."""
        parts: Dict[str, List[_Part]] = {}
        for name, file in self._files.items():
            for key, info in file.tensors.items():
                if key in parts:
                    raise AdapterFormatError(
                        f"{self.path} holds {shown(key)} both in {parts[key][0].file} and in {name}, and lacks "
                        f"{METADATA}, which says how the parts of several ranks join. Copy the folder again with it, "
                        "or, if the run was data parallel, give the file of one rank."
                    )
                parts[key] = [_Part(name, (0,) * len(info.shape), info.shape)]
        return parts

    def _joined(self, key: str, parts: List[_Part]) -> TensorInfo:
        """Returns the TensorInfo of a whole tensor, whose parts are checked against the files that hold them."""
        dtypes = set()
        for part in parts:
            info = self._files[part.file].tensors.get(key)
            if info is None or info.shape != part.shape:
                stored = "lacks it" if info is None else f"has it as {list(info.shape)}"
                raise AdapterFormatError(
                    f"{self.path}: {METADATA} says that {shown(key)} is in {part.file} as {list(part.shape)}, and the "
                    f"file {stored}. Copy the folder again."
                )
            dtypes.add(info.dtype)
        if len(dtypes) > 1:
            raise AdapterFormatError(f"{self.path} holds parts of {shown(key)} in several dtypes. Save it again.")
        # The last part of the grid ends where the whole tensor does.
        corner = max(parts, key=lambda part: part.offset)
        shape = tuple(map(sum, zip(corner.offset, corner.shape)))
        dtype = dtypes.pop()
        return TensorInfo(dtype, shape, 0, math.prod(shape) * dtype.itemsize)


def _is_model(match: Any) -> bool:
    return match is not None and match["kind"] == "model"


def check_all_there(folder: str, names: List[str]) -> None:
    """Checks, by the files' names, that no file of the model is missing."""
    matches = [match for match in map(_FILE.fullmatch, names) if match]
    expected = {file_number for match in matches for file_number in range(int(match["ranks"]))}
    missing = expected - {int(match["rank"]) for match in matches}
    if missing:
        raise AdapterFormatError(
            f"{folder} holds {len(matches)} of the {len(expected)} files of its step: those of rank "
            f"{', '.join(map(str, sorted(missing)[:5]))}{', ...' if len(missing) > 5 else ''} are missing. Copy the "
            "folder again."
        )


def _parts_in_metadata(folder: str) -> Dict[str, List[_Part]]:
    """Returns key -> parts of the model's tensors, by metadata.json."""
    path = os.path.join(folder, METADATA)
    with open(path, "rb") as file:
        content = parse_object(file.read(), path, AdapterFormatError)
    parts = {}
    try:
        for key, entry in content["state_dict_metadata"].items():
            of_key = _parts_of(key, entry, content["storage_data"])
            if _is_model(_FILE.fullmatch(of_key[0].file)):
                _check_covered(key, tuple(entry["global_shape"]), of_key, path)
                parts[key] = of_key
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise AdapterFormatError(
            f"{path} is not as MindFormers writes it ({type(error).__name__}: {error}). Copy the folder again."
        ) from error
    return parts


def _parts_of(key: str, entry: Dict[str, Any], storage: Dict[str, Any]) -> List[_Part]:
    """Returns the parts of a tensor; of equal copies on several ranks, the first rank's.

    An "offset" in metadata.json is the number of the part, counted along the last axis first.
    """
    counts = tuple(map(int, entry["axis_fragmentations"]))
    parts = []
    for chunk in entry["chunk"]:
        (number,) = map(int, chunk["global_offset"])
        shape = tuple(map(int, chunk["local_shape"]))
        name = storage[str((key, (number,)))][0]["file_name"]
        # The file must not make mindlora read files outside the folder.
        if name != os.path.basename(name) or not _FILE.fullmatch(name):
            raise ValueError(f"{shown(name)} is not the name of a file that it writes")
        place = np.unravel_index(number, counts) if counts else ()
        offset = tuple(int(index) * size for index, size in zip(place, shape))
        parts.append(_Part(name, offset, shape))
    return parts


def _check_covered(key: str, whole: Tuple[int, ...], parts: List[_Part], path: str) -> None:
    """Checks that the parts, laid out as a grid, are the whole tensor and that none of them overlap."""
    complete = True
    begins: List[Set[int]] = []
    for axis, size in enumerate(whole):
        ranges = sorted({(part.offset[axis], part.offset[axis] + part.shape[axis]) for part in parts})
        begins.append({begin for begin, _ in ranges})
        # Each range begins where the one before it ends, and the last ends where the tensor does.
        complete = complete and [begin for begin, _ in ranges] + [size] == [0] + [end for _, end in ranges]
    same_axes = all(len(part.shape) == len(part.offset) == len(whole) for part in parts)
    offsets = sorted(part.offset for part in parts)
    if not complete or not same_axes or offsets != sorted(itertools.product(*begins)):
        first = ", ".join(f"{list(part.shape)} at {list(part.offset)}" for part in parts[:4])
        raise AdapterFormatError(
            f"{path} does not say enough of {shown(key)}: the whole is {list(whole)}, and the parts are {first}"
            f"{', ...' if len(parts) > 4 else ''}. Copy the folder again, with the files of all ranks."
        )
