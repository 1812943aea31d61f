"""How one kind of model names its cells and parameters, in Hugging Face's world and in MindFormers'."""

import dataclasses
import functools
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from mindlora.models.joined_rows import RowLayout

# Parameters of a linear cell and of an embedding that have the same name in both worlds.
_LEAVES = ("weight", "bias")


class Names(NamedTuple):
    """One thing under its two names.

    Attributes:
        hf (str): Hugging Face's name.
        mindformers (str): MindFormers' name.
    """

    hf: str
    mindformers: str

    def under(self, world: str) -> str:
        """Returns the name in ``world``, which is "hf" or "mindformers"."""
        return str(getattr(self, world))


class JoinedCell(NamedTuple):
    """A linear cell of MindFormers that does the work of several cells, with their weights joined by rows.

    Attributes:
        name (str): The last part of its path, such as w_qkv.
        parts (tuple of str): The names of the cells that it replaces, in the order of their rows.
        layout (RowLayout): How their rows are ordered in its weight.
    """

    name: str
    parts: Tuple[str, ...]
    layout: RowLayout

    def paths(self, path: str) -> List[str]:
        """Returns the paths of the cells that the joined cell at ``path`` replaces."""
        parent = path.rpartition(".")[0]
        return [f"{parent}.{part}" if parent else part for part in self.parts]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """All that mindlora knows about one kind of model. A new kind is one such record and a line in registry.py.

    Attributes:
        title (str): For messages.
        model_types (tuple of str): MindFormers' classes, as a YAML names them, of a model or of its configuration.
        cells (tuple of Names): The ends of the linear cells' paths, without the output head.
        parameters (tuple of Names): The ends of all other parameters' names, without embedding and output head.
        embedding (Names): Path of the input embedding.
        embedding_weight (Names): The name of its table, after that path.
        output_head (Names): Path of the output head.
        joined (tuple of JoinedCell): MindFormers' joined cells.
        computed (tuple of str): The ends of names of tensors that some checkpoints hold, although every model computes
            them for itself.
        mcore (tuple): (pattern, replacement) pairs for re.sub, which turn paths of MindFormers' mcore model into those
            of its legacy model.
        linear_sizes (callable): model_config of a YAML -> {path: (out, in)} of the linear cells of MindFormers' model.
    """

    title: str
    model_types: Tuple[str, ...]
    cells: Tuple[Names, ...]
    parameters: Tuple[Names, ...]
    embedding: Names
    embedding_weight: Names
    output_head: Names
    joined: Tuple[JoinedCell, ...]
    computed: Tuple[str, ...]
    mcore: Tuple[Tuple[str, str], ...]
    linear_sizes: Callable[[dict], Dict[str, Tuple[int, int]]]

    def rename_path(self, path: str, source: str, target: str) -> Optional[str]:
        """Returns the path in the world ``target`` of the cell at ``path`` in ``source``, or None if not known.

        Args:
            path (str): Path of a cell, or an end of one.
            source, target (str): "hf" or "mindformers".
        """
        return _renamed(path, (*self._renamed_cells, self.output_head), source, target)

    def rename_parameter(self, name: str, source: str, target: str) -> Optional[str]:
        """Returns the name in the world ``target`` of the parameter ``name`` of ``source``, or None if not known.

        Args:
            name (str): Name of a parameter, or an end of one.
            source, target (str): "hf" or "mindformers".
        """
        found = _renamed(name, self._renamed_parameters, source, target)
        if found is not None:
            return found
        path, _, leaf = name.rpartition(".")
        path_there = _renamed(path, self._renamed_cells, source, target) if leaf in _LEAVES else None
        return None if path_there is None else f"{path_there}.{leaf}"

    def joined_cell(self, path: str) -> Optional[JoinedCell]:
        """Returns the record of the joined cell at ``path``, or None for any other cell."""
        leaf = path.rpartition(".")[2]
        return next((cell for cell in self.joined if cell.name == leaf), None)

    def is_linear(self, path: str) -> bool:
        """Tells whether the cell at ``path`` (MindFormers' name) is linear."""
        ends = [cell.mindformers for cell in (*self.cells, self.output_head)]
        return any(_ends(path, end) for end in ends) or self.joined_cell(path) is not None

    def embedding_table(self, world: str) -> str:
        """Returns the name of the input embedding's parameter in ``world``, "hf" or "mindformers"."""
        return f"{self.embedding.under(world)}.{self.embedding_weight.under(world)}"

    def head_weight(self, world: str) -> str:
        """Returns the name of the output head's parameter in ``world``, "hf" or "mindformers"."""
        return f"{self.output_head.under(world)}.weight"

    @functools.cached_property
    def _renamed_cells(self) -> Tuple[Names, ...]:
        return (*self.cells, Names(*(path.rpartition(".")[2] for path in self.embedding)))

    @functools.cached_property
    def _renamed_parameters(self) -> Tuple[Names, ...]:
        embedding = self._renamed_cells[-1]
        table = Names(*(f"{leaf}.{own}" for leaf, own in zip(embedding, self.embedding_weight)))
        return (*self.parameters, table, Names(*(f"{path}.weight" for path in self.output_head)))


def _renamed(name: str, pairs: Tuple[Names, ...], source: str, target: str) -> Optional[str]:
    for pair in pairs:
        end = pair.under(source)
        if _ends(name, end):
            return name[: len(name) - len(end)] + pair.under(target)
    return None


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)
