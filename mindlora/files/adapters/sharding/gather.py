"""gather_adapter: the checkpoints of all ranks of a sharded run become one adapter."""

import dataclasses
import os
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np

from mindlora.core.errors import AdapterFormatError, MissingTensorsError
from mindlora.core.text import listed
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters import metadata as adapter_metadata
from mindlora.files.adapters.convert import check_free, pairs_in_words, with_cells_of
from mindlora.files.adapters.dialects import mindformers
from mindlora.files.adapters.dialects.registry import FORMS
from mindlora.files.adapters.matching import rename
from mindlora.files.adapters.sharding import rank_files
from mindlora.files.adapters.sharding.rank_files import Content, RankFile
from mindlora.files.adapters.sharding.run_settings import NOTHING_KNOWN, RunSettings
from mindlora.files.adapters.sharding.strategy import Piece, Strategy, join, read_strategy
from mindlora.models import names
from mindlora.models.architectures.architecture import HF, MCORE


@dataclasses.dataclass(frozen=True)
class GatherReport:
    """What gather_adapter read and wrote.

    Attributes:
        checkpoint (str): The folder with the files of all ranks.
        step (str): Epoch and step in it.
        ranks (int): How many ranks of the run there were, in ``stages`` pipeline stages.
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
        settings (RunSettings): What the files do not say. Default: nothing.
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
    files = rank_files.find(checkpoint, at)
    strategy_of_base = read_strategy(strategy or _strategy_beside(checkpoint))
    rank_files.check_ranks(files, strategy_of_base.ranks, checkpoint, strategy_of_base.source)
    contents = {rank: rank_files.read(file, _wanted(file, settings)) for rank, file in files.items()}
    rank_files.check_steps(contents)
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
    """Returns which tensors of a file are the adapter's."""

    def wanted(name: str) -> bool:
        if mindformers.is_adapter_key(name):
            return True
        if mindformers.is_optimizer_key(name) or name in rank_files.APPENDED:
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
            f"{' and '.join(list(texts.values())[:2])} have different metadata of mindlora: they are of two adapters. "
            "Put the files of one run together."
        )
    (text,) = texts
    metadata = adapter_metadata.parse(text, texts[text])
    metadata["whole"] = [name for name in tensors if not mindformers.is_adapter_key(name)]
    return metadata
