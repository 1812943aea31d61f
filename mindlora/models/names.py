"""Names of cells and parameters in Hugging Face's and in MindFormers' legacy and mcore models, for the
models in registry.ARCHITECTURES."""

import functools
import itertools
import re
from typing import Callable, Collection, Dict, Iterable, List, Optional, Tuple

from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import HF, LEGACY, MCORE, WORLDS, Architecture, JoinedCell, ends_in

_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")


def to_hugging_face(path: str) -> str:
    """Returns ``path`` under Hugging Face's names; a path without MindFormers' names is unchanged."""
    return _path(path, (LEGACY, MCORE), HF)


def to_mindformers(path: str) -> str:
    """Returns ``path`` under the legacy models' names, which adapters use; an unknown one is unchanged."""
    return _path(path, (HF, MCORE), LEGACY)


def to_mcore(path: str) -> str:
    """Returns ``path`` under mcore's names; a path without Hugging Face's or the legacy models' names is unchanged."""
    return _path(path, (LEGACY, HF), MCORE)


def mcore_to_mindformers(path: str) -> str:
    """Returns ``path`` of an mcore model as to_mindformers does; layers are renamed even for unknown cells."""
    for architecture in registry.ARCHITECTURES:
        legacy = architecture.rename_path(path, MCORE, LEGACY)
        if legacy is not None:
            return legacy
    return registry.ARCHITECTURES[0].in_layers(path, MCORE, LEGACY)


def parameter_to_hugging_face(name: str) -> Optional[str]:
    """Returns the Hugging Face name of a parameter of either of MindFormers' worlds, or None if it is unknown."""
    return _parameter(name, (LEGACY, MCORE), HF)


def parameter_to_mindformers(name: str) -> Optional[str]:
    """Returns the name in MindFormers' legacy models of a parameter of another world, or None if it is unknown."""
    return _parameter(name, (HF, MCORE), LEGACY)


def parameter_in_adapters(name: str) -> str:
    """Returns a parameter's name in adapters: the legacy models', or Hugging Face's if these have none."""
    return parameter_to_mindformers(name) or _parameter(name, (MCORE,), HF) or name


def parameter_to_mcore(name: str) -> Optional[str]:
    """Returns the name in mcore of a parameter of another world, or None if it is not known."""
    return _parameter(name, (LEGACY, HF), MCORE)


def canonical(paths: Iterable[str], among: Iterable[str] = ()) -> Dict[str, str]:
    """Returns path -> to_mindformers(path) for cells of one network.

    Cells of two mcore models can have the same name, such as linear_qkv: together, the paths identify the model.
    ``among``, further paths of the network, only helps with that.
    """
    cells = list(paths)
    architecture = _knowing_most(lambda record, path: record.rename_path(path, MCORE, LEGACY), [*cells, *among])
    return {path: architecture.rename_path(path, MCORE, LEGACY) or to_mindformers(path) for path in cells}


def worlds_of(name: str, architecture: Architecture) -> Tuple[str, ...]:
    """Returns the worlds in which a model has a parameter called ``name``: of "hf", "mindformers" and "mcore"."""
    worlds = []
    for source, target in itertools.permutations(WORLDS, 2):
        if source not in worlds and architecture.rename_parameter(name, source, target):
            worlds.append(source)
    if not worlds and architecture.joined_parts(name.rpartition(".")[0]):
        return (LEGACY,)
    return tuple(worlds)


def aliases(path: str) -> Tuple[str, ...]:
    """Returns all paths by which a user may name the cell at ``path``."""
    others = [to_hugging_face(path)]
    if is_mcore(path):
        others.append(to_mindformers(path))
    return (path, *dict.fromkeys(other for other in others if other != path))


def is_mcore(path: str) -> bool:
    """Returns whether the cell at ``path`` has a name of mcore and of no other world."""
    return any(
        architecture.rename_path(path, MCORE, LEGACY) not in (None, path) for architecture in registry.ARCHITECTURES
    )


def belongs_to(name: str, module: str) -> bool:
    """Returns whether a parameter belongs to ``module``, a path or its end after a dot, under either world's names."""
    return any(ends_in(alias.rpartition(".")[0], module) for alias in (name, parameter_to_hugging_face(name) or name))


def layer_of(path: str) -> Optional[int]:
    """Returns the first number in ``path``, which is its layer, or None."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def joined_cell(path: str) -> JoinedCell:
    """Returns the record of the joined cell at ``path``; raises KeyError if joined_parts returns []."""
    for architecture in registry.ARCHITECTURES:
        cell = architecture.joined_cell(path)
        if cell is not None:
            return cell
    raise KeyError(path)


def joined_parts(path: str) -> List[str]:
    """Returns the paths of the cells that the joined cell at ``path`` replaces, or [] for any other cell."""
    parts = (architecture.joined_parts(path) for architecture in registry.ARCHITECTURES)
    return next(filter(None, parts), [])


def joined_path(path: str) -> Optional[str]:
    """Returns the path of the joined cell that replaces the cell at ``path`` (legacy names), or None."""
    joined = (architecture.joined_path(path) for architecture in _by_layers(path))
    return next(filter(None, joined), None)


def in_hugging_face(path: str) -> bool:
    """Returns whether Hugging Face's model has the cell at ``path``; an unknown one counts as its own.

    It lacks the joined cells of most models. For ChatGLM it has them, and lacks their parts.
    """
    if any(architecture.in_hugging_face(path) for architecture in registry.ARCHITECTURES):
        return True
    return not joined_parts(path) and joined_path(path) is None


def is_linear(path: str) -> bool:
    """Returns whether the cell at ``path`` (MindFormers' name) is a linear cell of a known model."""
    return any(architecture.is_linear(path) for architecture in registry.ARCHITECTURES)


@functools.lru_cache(maxsize=None)
def role_of(path: str) -> str:
    """Returns the legacy Llama's name for the cell or norm in the same place of a layer as the one at ``path``.

    Examples are w_qkv, wo and attention_norm (Architecture.roles). Any other path gives its last part.
    """
    if is_output_head(path):
        return "lm_head"
    if is_embedding(path):
        return "tok_embeddings"
    legacy = to_mindformers(path)
    if legacy == path:
        legacy = (parameter_to_mindformers(f"{path}.weight") or path).removesuffix(".weight")
    leaf = _leaf(legacy)
    roles = (architecture.roles.get(leaf) for architecture in _by_layers(path))
    return next(filter(None, roles), leaf)


def is_expert_weight(name: str) -> bool:
    """Returns whether ``name`` is the stacked weight of a layer's routed experts, under mcore's name."""
    stacks = (stack for architecture in registry.ARCHITECTURES for stack in architecture.experts)
    return any(ends_in(name, stack.names.mcore) for stack in stacks)


def is_output_head(path: str) -> bool:
    """Returns whether ``path`` is, or ends in the name of, an output head, under either world's names."""
    heads = (name for architecture in registry.ARCHITECTURES for name in architecture.output_head)
    return _leaf(path) in set(filter(None, map(_leaf, heads)))


def is_embedding(path: str) -> bool:
    """Returns whether ``path`` is, or ends in the name of, an input embedding, under either world's names."""
    paths = (ends for architecture in registry.ARCHITECTURES for ends in architecture.embedding_paths)
    return any(ends_in(path, end) for end in itertools.chain.from_iterable(paths))


def is_router(path: str) -> bool:
    """Returns whether ``path`` is, or ends in the name of, a router of tokens to experts, under any world's name."""
    return any(ends_in(path, end) for architecture in registry.ARCHITECTURES for end in architecture.router)


def embeddings() -> List[str]:
    """Returns the paths of the input embeddings (MindFormers' names)."""
    return list(dict.fromkeys(architecture.embedding.mindformers for architecture in registry.ARCHITECTURES))


def output_heads() -> List[str]:
    """Returns the paths of the output heads (MindFormers' names)."""
    return list(dict.fromkeys(architecture.output_head.mindformers for architecture in registry.ARCHITECTURES))


# Words in the names of parameters that are not state of a run: they describe a train step or are set when it resumes.
TRANSIENT = "transient_"


def is_computed(name: str) -> bool:
    """Returns whether every model computes this tensor of a checkpoint itself."""
    return any(name.endswith(architecture.computed) for architecture in registry.ARCHITECTURES)


def is_balance(name: str) -> bool:
    """Returns whether ``name`` is a bias with which a router balances its experts: it changes without a gradient."""
    return name.endswith((".expert_bias", ".e_score_correction_bias"))


def architecture_of(parameters: Iterable[str]) -> Architecture:
    """Returns the architecture that knows most of the names of a checkpoint's tensors, in either world."""

    def knows(architecture: Architecture, name: str) -> bool:
        return any(architecture.rename_parameter(name, *worlds) for worlds in itertools.permutations(WORLDS, 2))

    # Numbers of layers and experts do not matter.
    return _knowing_most(knows, {re.sub(r"\d+", "0", name) for name in parameters})


def architecture_of_cells(paths: Iterable[str]) -> Optional[Architecture]:
    """Returns the first architecture that has all of these cells (legacy names); None for Llama or no match."""
    cells = list(paths)
    for architecture in registry.ARCHITECTURES:
        target = HF if architecture.legacy else MCORE
        if None not in [architecture.rename_path(path, LEGACY, target) for path in cells]:
            return architecture if architecture is not registry.ARCHITECTURES[0] else None
    return None


def _knowing_most(knows: Callable[[Architecture, str], object], names: Iterable[str]) -> Architecture:
    """Returns the architecture that knows most of ``names``; if several do, the first of them."""
    return max(registry.ARCHITECTURES, key=lambda architecture: sum(bool(knows(architecture, name)) for name in names))


def _by_layers(name: str) -> List[Architecture]:
    """Returns all architectures, first those whose prefix of layers begins ``name``."""
    return sorted(registry.ARCHITECTURES, key=lambda architecture: not name.startswith(architecture.layer_starts))


def _path(path: str, sources: Tuple[str, ...], target: str) -> str:
    for architecture, source in itertools.product(_by_layers(path), sources):
        renamed = architecture.rename_path(path, source, target)
        if renamed is not None:
            return renamed
    return path


def _parameter(name: str, sources: Tuple[str, ...], target: str) -> Optional[str]:
    for architecture, source in itertools.product(_by_layers(name), sources):
        renamed = architecture.rename_parameter(name, source, target)
        if renamed is not None:
            return renamed
    return None


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def missing_prefix(of_model: Collection[str]) -> str:
    """Returns the prefix that names of a bare model lack, such as "model."; "" for other names.

    Names are a bare model's if a known model has one of them behind the prefix, and none of them begins with it.
    """
    for architecture in registry.ARCHITECTURES:
        for world in (HF, LEGACY):
            outer, _, layers = architecture.layers.under(world).partition(".")
            prefix = f"{outer}."
            if not layers or any(name.startswith(prefix) for name in of_model):
                continue
            if any(_is_bare(name, prefix, layers, architecture, world) for name in of_model):
                return prefix
    return ""


def with_prefix(name: str, prefix: str) -> str:
    """Returns a bare model's name as the model with a head has it; a head's name is unchanged."""
    is_head = any(map(is_output_head, (name, name.rpartition(".")[0])))
    return name if is_head else prefix + name


def _is_bare(name: str, prefix: str, layers: str, architecture: Architecture, world: str) -> bool:
    """Returns whether ``name`` belongs to a layer or stands beside the layers, and is known behind the prefix."""
    whole = prefix + name
    if not re.match(rf"{re.escape(layers)}\.\d+\.", name):
        # mcore's embedding.word_embeddings has nothing before it.
        is_mcores = name in _beside_layers(registry.ARCHITECTURES[0], MCORE)
        return whole in _beside_layers(architecture, world) and not is_mcores
    for other in WORLDS:
        if architecture.rename_path(whole, world, other) or architecture.rename_parameter(whole, world, other):
            return True
    parts = {part for stack in architecture.experts for part in stack.parts}
    return bool(_SINGLE_EXPERT.search(name)) and name.removesuffix(".weight").rpartition(".")[2] in parts


def _beside_layers(architecture: Architecture, world: str) -> List[str]:
    """Returns the names of the embedding, of its table, and of all parameters that may stand beside the layers."""
    parameters = [parameter.under(world) for parameter in architecture.parameters]
    return [architecture.embedding.under(world), architecture.embedding_table(world), *parameters]
