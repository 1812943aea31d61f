"""How Hugging Face and MindFormers (in its legacy and in its mcore models) name the cells and the parameters of the
models in registry.ARCHITECTURES."""

from typing import Iterable, List, Optional, Tuple

from mindlora.models import registry
from mindlora.models.architecture import HF, LEGACY, MCORE, Architecture, JoinedCell


def to_hugging_face(path: str) -> str:
    """Returns ``path`` under Hugging Face's names; a path with none of MindFormers' names comes back unchanged."""
    return _path(path, (LEGACY, MCORE), HF)


def to_mindformers(path: str) -> str:
    """Returns ``path`` under the names that adapters are kept under: those of MindFormers' legacy models.

    A path with none of Hugging Face's or mcore's names comes back unchanged.
    """
    return _path(path, (HF, MCORE), LEGACY)


def to_mcore(path: str) -> str:
    """Returns ``path`` under mcore's names; a path with none of Hugging Face's or the legacy models' is unchanged."""
    return _path(path, (LEGACY, HF), MCORE)


def mcore_to_mindformers(path: str) -> str:
    """Returns ``path`` of an mcore model as to_mindformers does; layers get their name even for an unknown cell."""
    for architecture in registry.ARCHITECTURES:
        found = architecture.rename_path(path, MCORE, LEGACY)
        if found is not None:
            return found
    return registry.ARCHITECTURES[0].in_layers(path, MCORE, LEGACY)


def parameter_to_hugging_face(name: str) -> Optional[str]:
    """Returns the Hugging Face name of a parameter of either of MindFormers' worlds, or None if it is not known."""
    return _parameter(name, (LEGACY, MCORE), HF)


def parameter_to_mindformers(name: str) -> Optional[str]:
    """Returns the name in MindFormers' legacy models of a parameter of another world, or None if it is not known."""
    return _parameter(name, (HF, MCORE), LEGACY)


def parameter_to_mcore(name: str) -> Optional[str]:
    """Returns the name in mcore of a parameter of another world, or None if it is not known."""
    return _parameter(name, (LEGACY, HF), MCORE)


def aliases(path: str) -> Tuple[str, ...]:
    """Returns every path under which a user may name the cell at ``path``."""
    others = [to_hugging_face(path)]
    if is_mcore(path):
        others.append(to_mindformers(path))
    return (path, *dict.fromkeys(other for other in others if other != path))


def is_mcore(path: str) -> bool:
    """Tells whether the cell at ``path`` has a name of mcore and of no other world."""
    return any(
        architecture.rename_path(path, MCORE, LEGACY) not in (None, path) for architecture in registry.ARCHITECTURES
    )


def belongs_to(name: str, module: str) -> bool:
    """Tells whether a parameter is of ``module``, under either world's names.

    Args:
        name (str): Name of the parameter.
        module (str): Path of a module, or its end after a dot.
    """
    aliases_of_name = {name, parameter_to_hugging_face(name) or name}
    return any(("." + alias.rpartition(".")[0]).endswith("." + module) for alias in aliases_of_name)


def layer_of(path: str) -> Optional[int]:
    """Returns the first number in ``path``, which is its layer, or None."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def joined_cell(path: str) -> JoinedCell:
    """Returns the record of the joined cell at ``path``.

    Raises:
        KeyError: The cell there is not a joined one, so joined_parts returns [].
    """
    cell = _joined_cell(path)
    if cell is None:
        raise KeyError(path)
    return cell


def joined_cells() -> List[JoinedCell]:
    """Returns the records of all joined cells."""
    return list(dict.fromkeys(cell for architecture in registry.ARCHITECTURES for cell in architecture.joined))


def joined_parts(path: str) -> List[str]:
    """Returns the paths of the cells that the joined cell at ``path`` replaces, or [] for any other cell."""
    found = (architecture.joined_parts(path) for architecture in registry.ARCHITECTURES)
    return next((parts for parts in found if parts), [])


def is_linear(path: str) -> bool:
    """Tells whether the cell at ``path`` (MindFormers' name) is a linear cell of a known model."""
    return any(architecture.is_linear(path) for architecture in registry.ARCHITECTURES)


def is_output_head(path: str) -> bool:
    """Tells whether ``path`` is, or ends in the name of, an output head, under either world's names."""
    return _leaf(path) in {_leaf(name) for found in registry.ARCHITECTURES for name in found.output_head if name}


def is_embedding(path: str) -> bool:
    """Tells whether ``path`` is, or ends in the name of, an input embedding, under either world's names."""
    return _leaf(path) in {_leaf(name) for found in registry.ARCHITECTURES for name in found.embedding if name}


def embeddings() -> List[str]:
    """Returns the paths of the input embeddings (MindFormers' names)."""
    return list(dict.fromkeys(architecture.embedding.mindformers for architecture in registry.ARCHITECTURES))


def output_heads() -> List[str]:
    """Returns the paths of the output heads (MindFormers' names)."""
    return list(dict.fromkeys(architecture.output_head.mindformers for architecture in registry.ARCHITECTURES))


def is_computed(name: str) -> bool:
    """Tells whether a tensor of a checkpoint is one that every model computes for itself."""
    return any(name.endswith(architecture.computed) for architecture in registry.ARCHITECTURES)


def architecture_of(parameters: Iterable[str]) -> Architecture:
    """Returns the architecture that knows most of the names of a checkpoint's tensors, in either world."""
    found = list(parameters)

    def known(architecture: Architecture) -> int:
        return sum(
            bool(
                architecture.rename_parameter(name, "hf", "mindformers")
                or architecture.rename_parameter(name, "mindformers", "hf")
            )
            for name in found
        )

    return max(registry.ARCHITECTURES, key=known)


def _path(path: str, sources: Tuple[str, ...], target: str) -> str:
    found = (
        architecture.rename_path(path, source, target) for architecture in registry.ARCHITECTURES for source in sources
    )
    return next((renamed for renamed in found if renamed is not None), path)


def _parameter(name: str, sources: Tuple[str, ...], target: str) -> Optional[str]:
    found = (
        architecture.rename_parameter(name, source, target)
        for architecture in registry.ARCHITECTURES
        for source in sources
    )
    return next((renamed for renamed in found if renamed is not None), None)


def _joined_cell(path: str) -> Optional[JoinedCell]:
    found = (architecture.joined_cell(path) for architecture in registry.ARCHITECTURES)
    return next((cell for cell in found if cell), None)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]
