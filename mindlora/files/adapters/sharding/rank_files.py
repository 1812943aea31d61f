"""The checkpoints of all ranks of a run: folders rank_0, rank_1, ... of which one step is read."""

import os
import re
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core.errors import AdapterFormatError, MissingTensorsError
from mindlora.core.formats import ckpt_file
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.text import listed
from mindlora.files.adapters import metadata as adapter_metadata

# As CheckpointMonitor names them: the prefix, the rank, how often the run was started, the epoch and the step in it.
_FILE = re.compile(
    r"(?P<prefix>.+?)_rank_(?P<rank>\d+)(?:_(?P<start>\d+))?(?P<kind>-trainable_params|-network)?"
    r"-(?P<epoch>\d+)_(?P<step>\d+)(?:_breakpoint)?\.(?:ckpt|safetensors)"
)
_RANK = re.compile(r"rank_(\d+)")
# What MindSpore puts beside the parameters of a whole checkpoint, to resume from.
APPENDED = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")


class RankFile(NamedTuple):
    """The checkpoint of one rank.

    Attributes:
        start (int): How often the run had been started before, under the same name.
        epoch, step (int): Epoch, and step in it, from the name of the file.
        trainable (bool): Whether it holds only what was trained.
    """

    path: str
    start: int
    epoch: int
    step: int
    trainable: bool

    @property
    def at(self) -> str:
        """Epoch and step as the names of the files have them."""
        return f"{self.epoch}_{self.step}"


class Content(NamedTuple):
    """What was read from a rank's file: mindlora's metadata, or "", and the steps of the run, if the file says so."""

    path: str
    tensors: Dict[str, np.ndarray]
    text: str
    steps: Optional[int]


def find(folder: str, at: Optional[str] = None) -> Dict[int, RankFile]:
    """Returns the file of each rank, all of one step: the newest, or ``at``, epoch and step in it, such as "2_100".

    ``folder`` holds rank_0, rank_1, ..., with files as CheckpointMonitor of MindFormers names them. Raises AdapterError
    if it does not, a rank lacks a file of this step or has two, or the ranks' newest files are of different steps.
    """
    if not os.path.isdir(folder):
        raise AdapterFormatError(f"{folder} is not a folder: it must be the one that holds rank_0, rank_1 and so on.")
    ranks = {int(match[1]): name for name in os.listdir(folder) if (match := _RANK.fullmatch(name))}
    if not ranks:
        raise AdapterFormatError(
            f"{folder} holds no folder rank_0: it must be the folder checkpoint or checkpoint_trainable of a run, with "
            "one folder for each rank."
        )
    files = {rank: file_of(os.path.join(folder, ranks[rank]), rank, at) for rank in sorted(ranks)}
    first = files[min(files)]
    for rank, file in files.items():
        if file.at != first.at:
            raise AdapterFormatError(
                f"{folder} holds different steps: the newest of rank {min(files)} is {first.at}, that of rank {rank} "
                f"is {file.at}. Give one that all ranks have (--step)."
            )
    return files


def check_ranks(files: Dict[int, RankFile], expected: int, folder: str, source: str) -> None:
    """Raises MissingTensorsError or AdapterFormatError unless exactly ranks 0 to ``expected`` - 1 are there."""
    missing = sorted(set(range(expected)) - set(files))
    if missing:
        raise MissingTensorsError(
            f"{folder} lacks rank {', '.join(map(str, missing))}: the strategy in {source} is one of {expected} ranks, "
            f"and here are {len(files)}. Copy the folders of all ranks, or give the strategy that this run saved."
        )
    if len(files) > expected:
        raise AdapterFormatError(
            f"{folder} has folders of {len(files)} ranks, but the strategy in {source} is one of {expected}: it is the "
            "strategy of another run. Give the one that this run saved."
        )


def read(file: RankFile, wanted: Callable[[str], bool]) -> Content:
    """Returns the ``wanted`` tensors of one rank's file."""
    if file.path.endswith(".ckpt"):
        tensors, text = ckpt_file.read(file.path, lambda name: name == "step_num" or wanted(name))
    else:
        with TensorFile(file.path) as opened:
            names = [name for name in opened.tensors if name == "step_num" or wanted(name)]
            tensors = {name: opened.read(name) for name in names}
            text = opened.metadata.get(adapter_metadata.KEY, "")
    steps = tensors.pop("step_num", None)
    return Content(file.path, tensors, text, None if steps is None else int(steps.reshape(-1)[0]))


def check_steps(contents: Dict[int, Content]) -> None:
    """Raises AdapterFormatError if the files say that they were saved after different numbers of steps."""
    first: Dict[Optional[int], Content] = {}
    for content in contents.values():
        first.setdefault(content.steps, content)
    if len(first) > 1:
        (one, there), (other, here) = list(first.items())[:2]
        raise AdapterFormatError(
            f"{there.path} was saved after {one} steps and {here.path} after {other}: they are of two runs. Put the "
            "files of one run together."
        )


def file_of(folder: str, rank: int, at: Optional[str] = None) -> RankFile:
    """Returns the file of one rank from its folder; ``at`` and the errors are as in ``find``."""
    files: Dict[Tuple[int, int, int], List[RankFile]] = {}
    for name in sorted(os.listdir(folder)):
        match = _FILE.fullmatch(name)
        if match and int(match["rank"]) == rank:
            key = int(match["start"] or 0), int(match["epoch"]), int(match["step"])
            kind = match["kind"] == "-trainable_params"
            files.setdefault(key, []).append(RankFile(os.path.join(folder, name), *key, kind))
    keys = [key for key in files if at is None or f"{key[1]}_{key[2]}" == at]
    if not keys:
        steps = ", ".join(f"{key[1]}_{key[2]}" for key in sorted(files)) or "none"
        expected = f"of step {at}" if at else f"named PREFIX_rank_{rank}-EPOCH_STEP.ckpt or .safetensors"
        raise MissingTensorsError(
            f"{folder} holds no checkpoint {expected}; the steps in it are: {steps}. Choose one of them (--step), or "
            "another folder."
        )
    chosen = files[max(keys)]
    if len(chosen) > 1:
        raise AdapterFormatError(
            f"{folder} holds {len(chosen)} checkpoints of one step: "
            f"{listed(os.path.basename(file.path) for file in chosen)}. Leave one of them there."
        )
    return chosen[0]
