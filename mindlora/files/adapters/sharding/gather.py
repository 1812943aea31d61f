"""gather_adapter: the checkpoints of all ranks of a sharded run, in folders rank_0, rank_1, ..., become one adapter."""

import dataclasses
import os
import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from mindlora.core.errors import AdapterFormatError, MissingTensorsError
from mindlora.core.formats import ckpt_file
from mindlora.core.formats.safetensors_file import TensorFile
from mindlora.core.text import listed
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.convert import check_free, pairs_in_words, with_cells_of
from mindlora.files.adapters.dialects import mindformers
from mindlora.files.adapters.dialects.registry import FORMS
from mindlora.files.adapters.matching import rename
from mindlora.files.adapters.sharding.run_settings import NOTHING_KNOWN, RunSettings
from mindlora.files.adapters.sharding.strategy import Piece, Strategy, join, read_strategy
from mindlora.models import names
from mindlora.models.architectures.architecture import HF, MCORE

# CheckpointMonitor's names: the prefix, the rank, the number of starts, the epoch and the step in it.
_FILE = re.compile(
    r"(?P<prefix>.+?)_rank_(?P<rank>\d+)(?:_(?P<start>\d+))?(?P<kind>-trainable_params|-network)?"
    r"-(?P<epoch>\d+)_(?P<step>\d+)(?:_breakpoint)?\.(?:ckpt|safetensors)"
)
_RANK = re.compile(r"rank_(\d+)")
# Entries that MindSpore adds to a whole checkpoint for resuming.
APPENDED = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")


class RankFile(NamedTuple):
    """The checkpoint of one rank.

    Attributes:
        start (int): How often the run had been started before under the same name.
        epoch, step (int): Epoch, and step in it, from the name of the file.
        trainable (bool): Whether it holds only trained parameters.
    """

    path: str
    start: int
    epoch: int
    step: int
    trainable: bool

    @property
    def at(self) -> str:
        """Epoch and step as in the names of the files."""
        return f"{self.epoch}_{self.step}"


class Content(NamedTuple):
    """The contents of a rank's file: mindlora's metadata, or "", and the steps of the run, if the file has them."""

    path: str
    tensors: Dict[str, np.ndarray]
    text: str
    steps: Optional[int]


def find_rank_files(folder: str, at: Optional[str] = None) -> Dict[int, RankFile]:
    """Returns the file of each rank, all at one step: the newest, or ``at``, epoch and step in it, such as "2_100".

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
    files = {rank: rank_file_of(os.path.join(folder, ranks[rank]), rank, at) for rank in sorted(ranks)}
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


def read_rank_file(file: RankFile, wanted: Callable[[str], bool]) -> Content:
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
    """Raises AdapterFormatError if the files were saved after different numbers of steps."""
    first: Dict[Optional[int], Content] = {}
    for content in contents.values():
        first.setdefault(content.steps, content)
    if len(first) > 1:
        (one, there), (other, here) = list(first.items())[:2]
        raise AdapterFormatError(
            f"{there.path} was saved after {one} steps and {here.path} after {other}: they are of two runs. Put the "
            "files of one run together."
        )


def rank_file_of(folder: str, rank: int, at: Optional[str] = None) -> RankFile:
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


@dataclasses.dataclass(frozen=True)
class GatherReport:
    """The result of gather_adapter.

    Attributes:
        checkpoint (str): The folder with the files of all ranks.
        step (str): Epoch and step in it.
        ranks (int): Number of ranks of the run, in ``stages`` pipeline stages.
        lora_ranks (tuple of int): The distinct ranks of the pairs.
        alphas (tuple of float): The distinct lora_alpha.
    """

    checkpoint: str
    step: str
    ranks: int
    stages: int
    output: str
    form: str
    pairs: int
    saved_modules: int
    lora_ranks: Tuple[int, ...]
    alphas: Tuple[float, ...]

    def __str__(self) -> str:
        content = pairs_in_words(self.pairs, self.lora_ranks, self.alphas, self.saved_modules)
        return (
            f"{self.checkpoint}, step {self.step} of {self.ranks} ranks in {self.stages} pipeline stages -> "
            f"{self.output} ({self.form}): {content}."
        )


def gather_adapter(
    checkpoint: str,
    output: str,
    to: str = "peft",
    strategy: Optional[str] = None,
    settings: RunSettings = NOTHING_KNOWN,
    at: Optional[str] = None,
    overwrite: bool = False,
) -> GatherReport:
    """Joins the slices of an adapter that the ranks of a run saved, bit for bit, and writes it.

    The base, quantized or not, and the optimizer's state are left out.

    Args:
        checkpoint (str): The folder that holds rank_0, rank_1, ...: checkpoint_trainable, checkpoint or
            checkpoint_network of a run of MindFormers, slices that LoraCheckpoint wrote, or what scatter_adapter wrote.
        output (str): Where to write.
        to (str): "peft", "mindformers", "ckpt", "slora", "mcore" or any other form that adapter_files.write takes.
            Default: "peft".
        strategy (str): The run's strategy file, merged, or the folder with one for each rank or stage. Default: None,
            the folder "strategy" in ``checkpoint`` or beside it.
        settings (RunSettings): Settings that the files lack. Default: none.
        at (str): Epoch and step in it, such as "2_100". Default: None, the newest.
        overwrite (bool): Whether ``output`` may be replaced. Default: False.

    Raises:
        MissingTensorsError: A rank, a slice or a tensor is missing.
        AdapterFormatError: The files are of different steps, copies of a slice differ, or the strategy is damaged.
        UnexpectedTensorsError, ShapeMismatchError: The strategy is another run's.
        ScaleMismatchError: Nothing states lora_alpha.
        LoraError: As in adapter_files.write and in convert_adapter.
    """
    check_free(checkpoint, output, overwrite)
    adapter_files.check_adapter_output(output, to)
    files = find_rank_files(checkpoint, at)
    strategy_of_base = read_strategy(strategy or _strategy_beside(checkpoint))
    check_ranks(files, strategy_of_base.ranks, checkpoint, strategy_of_base.source)
    contents = {rank: read_rank_file(file, _wanted(file, settings)) for rank, file in files.items()}
    check_steps(contents)
    tensors = _joined(contents, strategy_of_base, checkpoint)
    adapter = adapter_files.adapter_of_tensors(tensors, _metadata(contents, tensors), checkpoint)
    settings.complete(adapter, checkpoint)
    if FORMS[to].world in (HF, MCORE):
        rename(adapter, names.canonical(adapter.paths, among=strategy_of_base.cells()))
    adapter = with_cells_of(adapter, to, settings.heads)
    adapter_files.write(adapter, output, to)
    return GatherReport(
        checkpoint,
        files[0].at,
        strategy_of_base.ranks,
        len(strategy_of_base.stages),
        output,
        to,
        len(adapter.paths),
        len(adapter.saved_modules),
        adapter.ranks,
        tuple(sorted(set(adapter.alphas.values()))),
    )


def _strategy_beside(checkpoint: str) -> str:
    """Returns the folder in which the strategy of a run is expected: MindFormers' own, beside the checkpoints."""
    here = os.path.abspath(checkpoint)
    places = [os.path.join(folder, "strategy") for folder in (here, os.path.dirname(here))]
    for place in places:
        if os.path.isdir(place):
            return place
    raise AdapterFormatError(
        f"{checkpoint} has no folder strategy, and neither has the folder that it is in. Name the strategy files of "
        "the run (--strategy); MindFormers writes them to the folder strategy of its output."
    )


def _wanted(file: RankFile, settings: RunSettings) -> Callable[[str], bool]:
    """Returns the names of the adapter's tensors in a file."""

    def wanted(name: str) -> bool:
        if mindformers.is_adapter_key(name):
            return True
        if mindformers.is_optimizer_key(name) or name in APPENDED:
            return False
        return file.trainable or settings.is_saved_module(name)

    return wanted


def _joined(contents: Dict[int, Content], strategy: Strategy, checkpoint: str) -> Dict[str, np.ndarray]:
    """Returns name -> whole tensor."""
    pieces: Dict[str, List[Piece]] = {}
    for rank, content in contents.items():
        strategy.check_knows(list(content.tensors), content.path)
        layouts = strategy.layouts(rank)
        for name, array in content.tensors.items():
            # In a pipeline, a rank may hold untrained parameters of other stages too.
            if name in layouts:
                piece = Piece(content.path, strategy.slice_of(name, rank, array.shape), array)
                pieces.setdefault(name, []).append(piece)
    lost = sorted(name for name in strategy.names() if mindformers.is_adapter_key(name) and name not in pieces)
    if lost:
        raise MissingTensorsError(
            f"{checkpoint} lacks {listed(lost)}, which the strategy in {strategy.source} has: no rank of the stage "
            "saved it. Copy the files again, or give the strategy that this run saved."
        )
    return {name: join(name, parts) for name, parts in pieces.items()}


def _metadata(contents: Dict[int, Content], tensors: Dict[str, np.ndarray]) -> Dict[str, Any]:
    """Returns mindlora's metadata in the files, and which of the tensors are of saved modules."""
    texts = {content.text: content.path for content in contents.values()}
    if len(texts) > 1:
        raise AdapterFormatError(
            f"{' and '.join(list(texts.values())[:2])} have different metadata of mindlora: they belong to two "
            "adapters. Put the files of one run together."
        )
    (text,) = texts
    metadata = adapter_metadata.parse(text, texts[text])
    metadata["whole"] = [name for name in tensors if not mindformers.is_adapter_key(name)]
    return metadata
