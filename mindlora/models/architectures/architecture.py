"""A model's names of cells and parameters in three worlds: Hugging Face's, MindFormers' legacy and mcore models."""

import dataclasses
import functools
import itertools
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

from mindlora.core.fields import dtype_name
from mindlora.models.architectures.hugging_face import HuggingFaceConfig
from mindlora.models.architectures.joined_rows import RowLayout

# The widths of a model's attention, from the sizes of its cells.


class Attention(NamedTuple):
    """Widths of a layer's attention for one token, over all heads.

    Attributes:
        heads (int): Query heads.
        output (int): Input width of the output projection.
        cached (int): Elements of a token in the KV cache of a layer.
        latent (bool): Whether k and v come from a latent, which the cache holds in their place.
    """

    heads: int
    queries: int
    keys: int
    output: int
    cached: int
    latent: bool


def attention_by_heads(model_config: Mapping[str, Any], cells: Mapping[str, Tuple[int, int]]) -> Attention:
    """Returns the attention of a model with multi-head or grouped-query attention."""
    output = cells["wo"][1]
    keys = cells["wk"][0] if "wk" in cells else (cells["w_qkv"][0] - output) // 2
    heads = int(model_config.get("num_heads") or model_config.get("num_attention_heads") or 32)
    return Attention(heads, output, keys, output, 2 * keys, False)


# Hugging Face's names, those of MindFormers' legacy models, and those of its mcore models.
WORLDS = HF, LEGACY, MCORE = "hf", "mindformers", "mcore"
# Parameters of a linear cell and of an embedding that have the same name in all worlds.
_LEAVES = ("weight", "bias")
# An embedding's name that is ambiguous without the path before it.
_COMMON_WORD = "embedding"


class Names(NamedTuple):
    """The names of one cell or parameter in each world; "" where a world lacks it.

    A cell always has a name of MindFormers' legacy models, under which adapters are kept: where no legacy model has
    the cell, the record invents one.
    """

    hf: str
    mindformers: str
    mcore: str = ""

    def under(self, world: str) -> str:
        """Returns the name in ``world``, which is "hf", "mindformers" or "mcore"."""
        return str(getattr(self, world))

    @property
    def leaves(self) -> "Names":
        """The last parts of the names."""
        return Names(*(name.rpartition(".")[2] for name in self))

    def followed_by(self, *ends: str) -> "Names":
        """Returns the names with a suffix for each world, after a dot."""
        return Names(*(f"{name}.{end}" if name and end else "" for name, end in zip(self, ends)))


class ParameterSize(NamedTuple):
    """The shape and dtype of a parameter; the dtype is "float32", "float16" or "bfloat16"."""

    shape: Tuple[int, ...]
    dtype: str


def dtype_of(model_config: dict, key: str, default: str = "float32") -> str:
    """Returns the dtype at ``key`` of a YAML's model_config, or ``default`` where it has none."""
    return dtype_name(model_config.get(key) or default, key)


class JoinedCell(NamedTuple):
    """A linear cell of MindFormers that replaces several cells, with their weights joined by rows.

    Attributes:
        name (str): The last part of its path, such as w_qkv.
        parts (tuple of str): The last parts of the paths of the cells that it replaces, in the order of their rows.
        mcore (str): The last part of its path in mcore, such as linear_qkv; "" if mcore has no such cell.
    """

    name: str
    parts: Tuple[str, ...]
    layout: RowLayout
    mcore: str = ""

    def paths(self, path: str) -> List[str]:
        """Returns the paths of the cells that the joined cell at ``path`` replaces."""
        parent = path.rpartition(".")[0]
        return [f"{parent}.{part}" if parent else part for part in self.parts]


class Experts(NamedTuple):
    """A weight that stacks all routed experts of a layer.

    Attributes:
        names (Names): The end of its name: Hugging Face's tensor [experts, out, in], and mcore's of the same values
            [experts * in, out], each expert's transposed.
        parts (tuple of str): The cells of a single expert that it joins by rows, in checkpoints that keep the experts
            apart (mlp.experts.3.gate_proj.weight).
    """

    names: Names
    parts: Tuple[str, ...]


class Rotary(NamedTuple):
    """How positions rotate queries and keys.

    Attributes:
        factor (float): The leading share of a head that is rotated, unless partial_rotary_factor says otherwise.
        interleaved (bool): Whether neighbours form a pair; else element i pairs with i + half of the rotated part.
    """

    factor: float = 1.0
    interleaved: bool = False


def _takes_all(model_config: dict) -> Optional[str]:
    return None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """All that mindlora knows about one architecture. A new one is such a record and a line in registry.py.

    Attributes:
        title (str): For messages.
        model_types (tuple of str): MindFormers' classes, as a YAML names them: first the model's, then that of its
            configuration.
        cells (tuple of Names): The ends of the linear cells' paths, without the output head.
        parameters (tuple of Names): The ends of all other parameters' names, without embedding and output head.
        embedding (Names): Path of the input embedding.
        embedding_weight (Names): The name of its table, after that path.
        output_head (Names): Path of the output head.
        joined (tuple of JoinedCell): MindFormers' joined cells.
        computed (tuple of str): The ends of names of tensors that some checkpoints hold although every model computes
            them for itself.
        linear_sizes (callable): model_config of a YAML -> {path: (out, in)} of the linear cells of MindFormers' model.
        parameter_sizes (callable): model_config of a YAML -> {name: ParameterSize} of all parameters of MindFormers'
            model.
        layers (Names): The path before the number of a layer. Default: as in the Llama.
        experts (tuple of Experts): The weights in which a layer's routed experts are stacked. Default: none.
        router (Names): The end of the router's path. Default: none.
        expert_bias (bool): Whether routers balance their experts by a bias unless model_config says otherwise. Default:
            False.
        roles (mapping): The last part of the path of a cell or norm in MindFormers' legacy model -> the name of Llama's
            cell in the same place of a layer, where the two differ. Embedding and output head, and names that
            differ in mcore alone, need no entry. Default: none.
        attention (callable): model_config of a YAML, and role -> (out, in) of a layer's linear cells -> Attention.
            Default: heads with keys and values of their own.
        cache_blocks (int): num_blocks of the KV cache where a YAML does not set it. Default: 512.
        caches_in_training (bool): Whether MindFormers' model holds its KV cache while it trains, too. Default: False.
        takes_shifted_labels (bool): Whether the model compares each label with the output at its place, so that data
            holds labels shifted by one. Default: False.
        unsupported (callable): model_config of a YAML -> why that form of the model takes no adapters, and what
            to set instead, or None. Default: every form takes them.
        hugging_face_types (tuple of str): model_type in Hugging Face's config.json, and in the model_config of an mcore
            YAML. Default: none.
        hub_names (str): Regular expression of what such models are called there, in lower case. Default: "", none.
        from_hugging_face (callable): config.json -> model_config of a YAML, without dtypes, lengths and tokens; raises
            ConfigError for a setting that MindFormers' model does not have. Default: None, not known.
        legacy (bool): Whether MindFormers has a legacy model of it. Default: True.
        trains (bool): Whether MindFormers' model trains; if not, it only predicts. Default: True.
        instead (str): A sentence that says what to train in place of a model that does not train. Default: "".
        served (bool): Whether mindlora serves MindFormers' mcore model with its own network. Default: False.
        rotary (Rotary): The mcore model's rotary embedding. Default: whole heads, in halves.
        norm_eps (float): Epsilon of the mcore model's norms where a YAML does not set it. Default: 1e-6.
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
    linear_sizes: Callable[[dict], Dict[str, Tuple[int, int]]]
    parameter_sizes: Callable[[dict], Dict[str, ParameterSize]]
    layers: Names = Names("model.layers", "model.layers", "decoder.layers")
    experts: Tuple[Experts, ...] = ()
    router: Names = Names("", "", "")
    expert_bias: bool = False
    roles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    attention: Callable[[Mapping[str, Any], Mapping[str, Tuple[int, int]]], Attention] = attention_by_heads
    cache_blocks: int = 512
    caches_in_training: bool = False
    takes_shifted_labels: bool = False
    unsupported: Callable[[dict], Optional[str]] = _takes_all
    hugging_face_types: Tuple[str, ...] = ()
    hub_names: str = ""
    from_hugging_face: Optional[Callable[[HuggingFaceConfig], Dict[str, Any]]] = None
    legacy: bool = True
    trains: bool = True
    instead: str = ""
    served: bool = False
    rotary: Rotary = Rotary()
    norm_eps: float = 1e-6

    def rename_path(self, path: str, source: str, target: str) -> Optional[str]:
        """Returns the path in the world ``target`` of the cell at ``path`` (or an end of it) in ``source``, or None."""
        return self._renamed(path, "cells", source, target)

    def rename_parameter(self, name: str, source: str, target: str) -> Optional[str]:
        """Returns the name in ``target`` of the parameter (or an end of its name) in ``source``, or None."""
        renamed = self._renamed(name, "parameters", source, target)
        if renamed is not None:
            return renamed
        path, _, leaf = name.rpartition(".")
        path_there = self._renamed(path, "cells with weights", source, target) if leaf in _LEAVES else None
        return None if path_there is None else f"{path_there}.{leaf}"

    def in_layers(self, path: str, source: str, target: str) -> str:
        """Returns ``path`` of ``source`` with ``target``'s prefix before the number of a layer."""
        here = self.layers.under(source)
        there = self.layers.under(target)
        path = within_mcore(path) if source == MCORE else path
        return there + path[len(here) :] if here and there and path.startswith(here + ".") else path

    def joined_cell(self, path: str) -> Optional[JoinedCell]:
        """Returns the record of the joined cell at ``path`` (either of MindFormers' names), or None for any other."""
        leaf = path.rpartition(".")[2]
        return next((cell for cell in self.joined if leaf and leaf in (cell.name, cell.mcore)), None)

    def joined_parts(self, path: str) -> List[str]:
        """Returns the paths, in the world of ``path``, that the joined cell there replaces, or [] for any other."""
        cell = self.joined_cell(path)
        if cell is None or path.rpartition(".")[2] == cell.name:
            return cell.paths(path) if cell else []
        leaves = {cell.leaves.mindformers: cell.leaves.mcore for cell in self.cells}
        return cell._replace(parts=tuple(leaves[part] for part in cell.parts)).paths(path)

    def joined_path(self, path: str) -> Optional[str]:
        """Returns the legacy path of the joined cell that replaces the cell at the legacy ``path``, or None."""
        parent, _, leaf = path.rpartition(".")
        if not any(ends_in(path, cell.mindformers) for cell in self.cells):
            return None
        name = next((cell.name for cell in self.joined if leaf in cell.parts), None)
        return name and (f"{parent}.{name}" if parent else name)

    def is_linear(self, path: str) -> bool:
        """Returns whether the cell at ``path`` (either of MindFormers' names) is linear."""
        cells = (*self.cells, self.output_head)
        is_cell = any(ends_in(path, cell.mindformers) or ends_in(path, cell.mcore) for cell in cells)
        return is_cell or self.joined_cell(path) is not None

    def in_hugging_face(self, path: str) -> bool:
        """Returns whether Hugging Face's model has the cell at ``path`` (either of MindFormers' names) as one cell."""
        return any(self.rename_path(path, world, HF) is not None for world in (LEGACY, MCORE))

    def embedding_table(self, world: str) -> str:
        """Returns the name of the input embedding's parameter in ``world``."""
        return f"{self.embedding.under(world)}.{self.embedding_weight.under(world)}"

    def head_weight(self, world: str) -> str:
        """Returns the name of the output head's parameter in ``world``."""
        return f"{self.output_head.under(world)}.weight"

    @functools.cached_property
    def embedding_paths(self) -> Tuple[Names, ...]:
        """The path of the input embedding, and the end of it that identifies an embedding without the rest."""
        leaves = self.embedding.leaves
        return (self.embedding,) if _COMMON_WORD in leaves else (self.embedding, leaves)

    @functools.cached_property
    def _cells_with_weights(self) -> Tuple[Names, ...]:
        return (*self.cells, *self._joined_names, *self.embedding_paths)

    @functools.cached_property
    def _renamed_cells(self) -> Tuple[Names, ...]:
        return (*self._cells_with_weights, self.output_head, self.router, *(stack.names for stack in self.experts))

    @functools.cached_property
    def _joined_names(self) -> Tuple[Names, ...]:
        """The ends of the joined cells' paths in MindFormers' two worlds, each beside its first part."""
        paths = []
        for joined, cell in itertools.product(self.joined, self.cells):
            if cell.leaves.mindformers == joined.parts[0] and cell.mcore and joined.mcore:
                _, legacy, mcore = (path.rpartition(".")[0] for path in cell)
                paths.append(Names("", f"{legacy}.{joined.name}", f"{mcore}.{joined.mcore}"))
        return tuple(paths)

    @functools.cached_property
    def _renamed_parameters(self) -> Tuple[Names, ...]:
        tables = [path.followed_by(*self.embedding_weight) for path in self.embedding_paths]
        return (*self.parameters, *tables, self.output_head.followed_by("weight", "weight", "weight"))

    @functools.cached_property
    def layer_starts(self) -> Tuple[str, ...]:
        """The prefix of all names in a layer, in each world."""
        return tuple(f"{start}." for start in self.layers if start)

    @functools.cached_property
    def _by_leaf(self) -> Dict[Tuple[str, str], Dict[str, List[Names]]]:
        """("cells" or "parameters", world) -> last part of a name -> the names that end in it."""
        kinds = {
            "cells": self._renamed_cells,
            "cells with weights": self._cells_with_weights,
            "parameters": self._renamed_parameters,
        }
        tables: Dict[Tuple[str, str], Dict[str, List[Names]]] = {}
        for kind, world in itertools.product(kinds, WORLDS):
            table = tables.setdefault((kind, world), {})
            for pair in kinds[kind]:
                table.setdefault(pair.leaves.under(world), []).append(pair)
        return tables

    def _renamed(self, name: str, kind: str, source: str, target: str) -> Optional[str]:
        name = within_mcore(name) if source == MCORE else name
        for pair in self._by_leaf[kind, source].get(name.rpartition(".")[2], ()):
            here = pair.under(source)
            there = pair.under(target)
            if there and ends_in(name, here) and not self._is_anothers(name, pair, source):
                return self.in_layers(name[: len(name) - len(here)] + there, source, target)
        return None

    def _is_anothers(self, name: str, pair: Names, source: str) -> bool:
        """Returns whether ``name``, which ``source`` shares with another world, begins like the other's layers."""
        if name.startswith(self.layers.under(source) + "."):
            return False
        sharing = [start for start, end in zip(self.layers, pair) if start and end == pair.under(source)]
        return any(within_mcore(name).startswith(start + ".") for start in sharing)


def within_mcore(path: str) -> str:
    """Returns a path of an mcore model without the leading "model.", which cells have and parameters lack."""
    rest = path[len("model.") :]
    return rest if path.startswith("model.") and rest.startswith(("decoder.", "embedding.", "output_layer")) else path


def ends_in(name: str, end: str) -> bool:
    """Returns whether ``name`` is ``end``, or ends in it after a dot; False for the end ""."""
    return bool(end) and (name == end or name.endswith("." + end))
